"""What both worker roles share: loading the engine, serving, registering, and ending together."""

import asyncio
import gc
import logging
import os
import signal
import uuid
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from cluster.drain import SIGTERM_LIMIT_S, Drain
from cluster.registry import Registration
from cluster.worker_service import Control, WorkerServicer
from engine.load import Engine, EngineConfig, load_engine
from pdserve import rpc
from pdserve.config import ClusterConfig, NodeConfig
from pdserve.errors import Unavailable
from pdserve.internal.v1 import worker_pb2_grpc
from pdserve.membership import Role, WorkerInfo
from pdserve.request import Incarnation, WorkerId
from transport.base import LinkConfig, Own

_log = logging.getLogger(__name__)
WORKER_SERVICE = "pdserve.internal.v1.WorkerService"
HANG_UP_S = 1.0  # for routers to see that a drained worker has left, before its streams break


def load(config: NodeConfig) -> Engine:
    """The engine of this worker; takes seconds."""
    engine = load_engine(engine_config(config.cluster, config.model_dir))
    gc.freeze()  # what was loaded stays: no full collection need walk it while tokens wait
    return engine


def engine_config(cluster: ClusterConfig, model_dir: str) -> EngineConfig:
    """Of every worker of a resolved cluster."""
    assert cluster.dtype != "auto"
    assert cluster.device != "auto"
    return EngineConfig(
        model_path=model_dir,
        name=cluster.name,
        dtype=cluster.dtype,
        device=cluster.device,
        num_pages=cluster.num_pages,
        threads=cluster.threads,
        fast=cluster.fast,
    )


def own_end(config: NodeConfig, engine: Engine) -> Own:
    """This incarnation, drawn anew at every start."""
    return Own(WorkerId(config.worker_id), Incarnation(uuid.uuid4().hex), engine.card)


def link_config(config: NodeConfig, engine: Engine) -> LinkConfig:
    """How this cluster makes links."""
    cluster = config.cluster
    assert cluster.backend != "auto"  # resolved
    return LinkConfig(backend=cluster.backend, slot_bytes=slot_bytes(config, engine), host=cluster.host)


def slot_bytes(config: NodeConfig, engine: Engine) -> int:
    """As configured, but never less than one page: pages travel whole."""
    return max(config.cluster.slot_bytes, engine.card.kv_layout.page_bytes)


class WorkerServer:
    """The gRPC server of one worker, from its start to the end of what keeps it alive."""

    def __init__(self, config: NodeConfig, role: Role, own: Own) -> None:
        self._config = config
        self._role = role
        self._own = own
        self.grpc = rpc.server()

    async def run(self, control: Control, services: Sequence[str], parts: Sequence[Awaitable[object]]) -> str:
        """Serve and be registered until the worker has drained: returns how that went, and it must not come back.

        Raises Unavailable when one of `parts` ends before that, and whatever it fails with: all of them end with it.
        """
        servicer = WorkerServicer(self._own.worker, self._role, self._own.incarnation, control)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self.grpc)
        info = await self._serve(services)
        # over Ray's own handler, which ends the process at once
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, control.drain.begin, SIGTERM_LIMIT_S)
        tasks = [asyncio.ensure_future(part) for part in (control.drain.run(), *parts)]
        try:
            async with Registration(self._config.redis_url, self._config.namespace, info):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return _why_it_leaves(info.id, done, control.drain)
        finally:
            for task in tasks:
                task.cancel()
            await self.grpc.stop(HANG_UP_S if control.drain.is_draining else 0)

    async def _serve(self, services: Sequence[str]) -> WorkerInfo:
        health = rpc.add_health_and_reflection(self.grpc, [WORKER_SERVICE, *services])
        port = rpc.listen(self.grpc, self._config.cluster.host, 0)
        await self.grpc.start()
        await health.set(serving=True)
        info = self._info(port)
        _log.info("%s %s serves on %s", info.id, info.incarnation, info.address)
        return info

    def _info(self, port: int) -> WorkerInfo:
        address = f"{self._config.cluster.host}:{port}"
        return WorkerInfo(self._own.worker, self._role, self._own.incarnation, address, os.getpid(), self._own.card)


def _why_it_leaves(worker: WorkerId, done: Iterable["asyncio.Future[Any]"], drain: Drain[Any]) -> str:
    """What ended a drain, be it a failure: it was about to leave anyhow. Raises where there is none."""
    for task in done:
        if not drain.is_draining:
            raise Unavailable(f"{worker} ends: {task.result()}")
        _log.info("%s leaves: %s", worker, task.exception() or task.result())
    return "; ".join(str(task.exception() or task.result()) for task in done)
