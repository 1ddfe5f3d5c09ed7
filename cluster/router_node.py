"""A router in this process: text in, text out, over the workers that the registry names.

It loads, waits for its turn (as a spare, for as long as another one serves), listens, serves, drains.
"""

import asyncio
import gc
import logging
import signal
from pathlib import Path

import grpc.aio

from cluster.registry import RegistryMembership
from cluster.turn import turn
from pdserve import rpc
from pdserve.config import ClusterConfig, NodeConfig
from pdserve.errors import Unavailable
from pdserve.v1 import cluster_pb2_grpc, generation_pb2_grpc
from router.cluster_service import ClusterServicer
from router.directory import Directory
from router.dispatch import Dispatcher
from router.models import Models, Status
from router.pipeline import Pipeline
from router.service import GenerationServicer
from router.tokenizer import TextModel
from router.waiting_room import WaitingRoom

_log = logging.getLogger(__name__)
SERVICES = ("pdserve.v1.GenerationService", "pdserve.v1.ClusterService")
DRAIN_LIMIT_S = 10.0
LISTEN_LIMIT_S = 2.0  # the port of a router that was killed is free a little later than its turn
LISTEN_INTERVAL_S = 0.02


async def serve_router(config: NodeConfig, lock: Path) -> None:
    """Serve when it is this one's turn, until SIGTERM or SIGINT; then let running requests finish within a limit."""
    text = TextModel.load(Path(config.model_dir))
    gc.freeze()  # what was loaded stays: a full collection that walked it would stop every stream for 80 ms
    async with turn(lock):
        await _serve(config, text)


async def _serve(config: NodeConfig, text: TextModel) -> None:
    cluster = config.cluster
    room = WaitingRoom(cluster.queue_limit, cluster.patience)
    health_changed = asyncio.Event()

    def changed() -> None:
        room.poke()
        health_changed.set()

    directory = Directory(RegistryMembership(config.redis_url, config.namespace), cluster.stuck_after_s, changed)
    pipeline = Pipeline(Dispatcher(directory, room, cluster.chunk_tokens))
    server = rpc.public_server()
    generation = GenerationServicer(Models(cluster.name, text, directory), pipeline)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterServicer(Status(directory, room, pipeline)), server)
    health = rpc.add_health_and_reflection(server, SERVICES)
    port = await _listen(server, cluster)
    await server.start()
    _log.info("router serves on %s:%d", cluster.host, port)
    following = asyncio.create_task(directory.run())
    reporting = asyncio.create_task(_report_health(health, directory, health_changed))
    try:
        await _told_to_stop(following)
        reporting.cancel()  # or the next beat would report SERVING again
        await health.set(serving=False)
        await _drain(server, directory)
    finally:
        following.cancel()
        reporting.cancel()
        await asyncio.gather(following, reporting, return_exceptions=True)


async def _listen(server: grpc.aio.Server, cluster: ClusterConfig) -> int:
    """Bind and return the port. Raises Unavailable when it stays taken."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LISTEN_LIMIT_S
    while True:
        try:
            return rpc.listen(server, cluster.host, cluster.grpc_port)
        except Unavailable:
            if loop.time() > until:
                raise
        await asyncio.sleep(LISTEN_INTERVAL_S)  # the kernel tells nobody when a port is free


async def _drain(server: grpc.aio.Server, directory: Directory) -> None:
    """No new requests; running ones have a limit, then they end with an error that says why."""
    stopping = asyncio.create_task(server.stop(DRAIN_LIMIT_S + 1.0))
    await asyncio.wait((stopping,), timeout=DRAIN_LIMIT_S)
    directory.fail_all(Unavailable("the router is shutting down, send the request again"))
    await stopping


async def _told_to_stop(following: asyncio.Task[None]) -> None:
    """Wait for a signal; a directory that fails ends the router."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait((following, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if following.done():
        following.result()


async def _report_health(health: rpc.Health, directory: Directory, changed: asyncio.Event) -> None:
    """SERVING exactly while some prefill worker reaches some decode worker."""
    while True:
        await health.set(serving=directory.is_serving)
        changed.clear()
        await changed.wait()
