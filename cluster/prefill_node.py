"""A prefill worker in this process."""

from dataclasses import dataclass

from cluster.chaos import Chaos
from cluster.drain import Drain
from cluster.engine_thread import EngineThread
from cluster.meter import Meter, measured_limits
from cluster.registry import RegistryMembership
from cluster.worker_node import WorkerServer, link_config, load, own_end, slot_bytes
from cluster.worker_service import Control
from pdserve.config import NodeConfig
from pdserve.internal.v1 import prefill_pb2_grpc
from pdserve.membership import Membership
from pdserve.request import WorkerId
from pdserve.vitals import Vitals
from prefill_worker import commands
from prefill_worker.commands import StepUpdate
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker
from transport.control import prefill_links
from transport.send import PrefillLinks

SERVICES = ("pdserve.internal.v1.PrefillService",)


@dataclass(frozen=True)
class _Vitals:
    """The engine's vitals, with the decode workers that its links reach."""

    thread: EngineThread[StepUpdate]
    links: PrefillLinks

    def vitals(self) -> Vitals:
        return self.thread.vitals(linked=tuple(self.links.links_up().values()))


async def serve_prefill(config: NodeConfig) -> str:
    """Load, serve, register; returns how the worker left for good, raises when it is of no use any more."""
    engine = load(config)
    own = own_end(config, engine)
    cluster = config.cluster
    worker = PrefillWorker(
        engine,
        cluster.chunk_tokens,
        slot_bytes(config, engine),
        verify_kv=cluster.verify_kv,
        patience=cluster.patience,
    )
    links = prefill_links(own, link_config(config, engine), engine.cache.pages.device)
    servicer = PrefillServicer(worker.submit, links)
    thread: EngineThread[StepUpdate] = EngineThread(worker, servicer.deliver)
    server = WorkerServer(config, "prefill", own)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.grpc)
    following = _follow(RegistryMembership(config.redis_url, config.namespace), links)
    chaos = Chaos(config.cluster.chaos, links, links)
    meter = Meter(_Vitals(thread, links), thread, engine.runner.tally, measured_limits(config))
    control = Control(thread, meter, Drain(worker, commands.Drain(), commands.Expel), chaos)
    thread.start()
    try:
        parts = [thread.watch(cluster.stuck_after_s), links.fatal, following, servicer.watch_aborts()]
        return await server.run(control, SERVICES, parts)
    finally:
        await links.close()
        await thread.stop()


async def _follow(membership: Membership, links: PrefillLinks) -> None:
    """Keep a link to every decode worker that is a member."""
    kept: list[WorkerId] = []
    async for view in membership.views():
        decodes = {info.id: info for info in view if info.role == "decode"}
        for gone in [worker for worker in kept if worker not in decodes]:
            links.forget(gone)
        for info in decodes.values():
            links.connect(info)
        kept = list(decodes)
