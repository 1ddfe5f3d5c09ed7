"""A prefill worker in this process."""

from dataclasses import dataclass

from cluster.engine_thread import EngineThread
from cluster.registry import RegistryMembership
from cluster.worker_node import WorkerServer, link_config, load, own_end, slot_bytes
from pdserve.config import NodeConfig
from pdserve.internal.v1 import prefill_pb2_grpc
from pdserve.membership import Membership
from pdserve.request import WorkerId
from pdserve.vitals import Vitals
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


async def serve_prefill(config: NodeConfig) -> None:
    """Load, serve, register; returns or raises when the worker is of no use any more."""
    engine = load(config)
    own = own_end(config, engine)
    worker = PrefillWorker(engine, config.cluster.chunk_tokens, slot_bytes(config, engine))
    links = prefill_links(own, link_config(config, engine), engine.cache.pages.device)
    servicer = PrefillServicer(worker.submit, links)
    thread: EngineThread[StepUpdate] = EngineThread(worker, servicer.deliver)
    server = WorkerServer(config, "prefill", own)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.grpc)
    following = _follow(RegistryMembership(config.redis_url, config.namespace), links)
    thread.start()
    try:
        await server.run(
            _Vitals(thread, links), SERVICES, [thread.watch(config.cluster.stuck_after_s), links.fatal, following]
        )
    finally:
        await links.close()
        await thread.stop()


async def _follow(membership: Membership, links: PrefillLinks) -> None:
    """Keep a link to every decode worker that is a member."""
    kept: set[WorkerId] = set()
    async for view in membership.views():
        decodes = {info.id: info for info in view if info.role == "decode"}
        for gone in kept - decodes.keys():
            links.forget(gone)
        for info in decodes.values():
            links.connect(info)
        kept = set(decodes)
