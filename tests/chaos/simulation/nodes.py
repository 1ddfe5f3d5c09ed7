"""The three kinds of processes of a run: the parts of `cluster.prefill_node`, `decode_node` and `router_node`, over
simulated channels, wires, registry and engines.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from cluster.drain import Drain
from cluster.prefill_node import _follow
from decode_worker import commands as decode_commands
from decode_worker.service import DecodeServicer, Receiver
from decode_worker.worker import DecodeWorker
from pdserve import rpc
from pdserve.internal.v1 import decode_pb2_grpc, link_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc
from pdserve.membership import Role, WorkerInfo
from pdserve.request import Incarnation, WorkerId
from pdserve.vitals import Vitals, WatchServicer
from prefill_worker import commands as prefill_commands
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker
from router.directory import Directory
from router.dispatch import Dispatcher
from router.pipeline import Pipeline
from router.waiting_room import WaitingRoom
from tests.chaos.simulation.channel import Channel
from tests.chaos.simulation.fake_engine import FakeEngine, card
from tests.chaos.simulation.membership import Following, Registry
from tests.chaos.simulation.network import Network
from tests.chaos.simulation.server import Server
from tests.chaos.simulation.shape import Shape
from tests.chaos.simulation.stepped import Speed, SteppedEngine
from tests.chaos.simulation.virtual_loop import Host
from tests.chaos.simulation.watched import said_too_early
from tests.chaos.simulation.wires import HostWires, WireNet
from transport.base import Own
from transport.control import LinkServicer, decode_frame, request_of
from transport.protocol import DecodeFrame, PrefillFrame
from transport.receive import DecodeLinks
from transport.send import PrefillLinks

PREFILL_STEP_S = (0.005, 0.03)
DECODE_STEP_S = (0.01, 0.04)


@dataclass(frozen=True)
class World:
    """What all nodes of a run share."""

    shape: Shape
    network: Network
    wires: WireNet
    registry: Registry

    def connect(self, host: Host, address: str) -> grpc.aio.Channel:
        """A channel from this host."""
        return cast(grpc.aio.Channel, Channel(self.network, host, address))


@dataclass(frozen=True)
class _Control:
    """As transport.control.GrpcControl, over a simulated channel."""

    world: World
    host: Host

    async def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        async with self.world.connect(self.host, peer.address) as channel:
            call = link_pb2_grpc.LinkServiceStub(channel).Open(request_of(frame) async for frame in frames)
            try:
                async for response in call:
                    yield decode_frame(response)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error) from error
            finally:
                call.cancel()


class _Watch(WatchServicer):
    """The beats, without the commands of WorkerService: the run drains and kills by itself."""

    GetLedger: Any = None
    Drain: Any = None
    InflictChaos: Any = None


class WorkerNode:
    """What both kinds of workers have."""

    def __init__(self, world: World, host: Host, info: WorkerInfo) -> None:
        self.world = world
        self.host = host
        self.info = info
        self.own = Own(info.id, info.incarnation, info.card)
        self.server = Server(world.network, host, info.address)
        self.engine: SteppedEngine[Any]
        self.worker: PrefillWorker | DecodeWorker
        self.drain: Drain[Any]

    def vitals(self) -> Vitals:
        """See VitalsSource."""
        return self.engine.vitals(linked=self.linked(), draining=self.drain.is_draining)

    def linked(self) -> tuple[Incarnation, ...]:
        """The decode workers that a prefill worker reaches."""
        return ()

    def background(self) -> list[Any]:
        """Coroutines that run beside the engine."""
        raise NotImplementedError

    def links_at_rest(self) -> int:
        """How many links are up, with nothing on their way and all slots free."""
        raise NotImplementedError

    async def serve(self) -> None:
        """Until killed, or drained; a part that fails is a finding."""
        watch = _Watch(self.info.incarnation, self)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(watch, cast(Any, self.server))
        self.world.registry.register(self.info)
        parts = [asyncio.ensure_future(part) for part in (self.drain.run(), self.engine.run(), *self.background())]
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            result = part.result()
            if not self.drain.is_draining:
                self.world.network.problems.append(f"{self.host.name} ended by itself: {result}")
        self.world.registry.leave(self.info.id, self.info.incarnation)


class PrefillNode(WorkerNode):
    """cluster.prefill_node."""

    def __init__(self, world: World, host: Host, info: WorkerInfo) -> None:
        super().__init__(world, host, info)
        shape, random = world.shape, world.network.random
        engine = FakeEngine.with_pages(shape.prefill_pages).as_engine()
        self.worker = PrefillWorker(engine, shape.chunk_tokens, shape.link.slot_bytes, verify_kv=shape.verify_kv)
        self.links = PrefillLinks(self.own, shape.link, _Control(world, host), HostWires(world.wires, host))
        self.servicer = PrefillServicer(lambda command: self.engine.submit(command), self.links)
        self.engine = SteppedEngine(self.worker, self._deliver, Speed(PREFILL_STEP_S), random)
        self.drain = Drain(self.worker, prefill_commands.Drain(), prefill_commands.Expel)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self.servicer, cast(Any, self.server))

    def _deliver(self, update: prefill_commands.StepUpdate) -> None:
        self.engine.problems += said_too_early(update)
        self.servicer.deliver(update)

    def linked(self) -> tuple[Incarnation, ...]:
        return tuple(self.links.links_up().values())

    def background(self) -> list[Any]:
        return [self.links.fatal, _follow(Following(self.world.registry), self.links), self.servicer.watch_aborts()]

    def links_at_rest(self) -> int:
        links, num_slots = self.links._links.values(), self.world.shape.link.num_slots
        return sum(link.is_up and not link._pushes and len(link._pool._free) == num_slots for link in links)


class DecodeNode(WorkerNode):
    """cluster.decode_node."""

    def __init__(self, world: World, host: Host, info: WorkerInfo) -> None:
        super().__init__(world, host, info)
        shape, random = world.shape, world.network.random
        engine = FakeEngine.with_pages(shape.decode_pages).as_engine()
        self.worker = worker = DecodeWorker(engine, self.own.worker, self.own.incarnation, shape.max_batch)
        self.links = DecodeLinks(self.own, shape.link, HostWires(world.wires, host))
        self.receiver = Receiver(lambda command: self.engine.submit(command), worker.is_live, self.links)
        self.servicer = DecodeServicer(lambda command: self.engine.submit(command), self.receiver)
        self.engine = SteppedEngine(worker, self.servicer.deliver, Speed(DECODE_STEP_S), random)
        self.drain = Drain(worker, decode_commands.Drain(), decode_commands.Expel)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.servicer, cast(Any, self.server))
        link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(self.links), cast(Any, self.server))

    def background(self) -> list[Any]:
        return [self.links.fatal, self.receiver.run()]

    def links_at_rest(self) -> int:
        links, num_slots = self.host.links, self.world.shape.link.num_slots
        return sum(link._line.is_up and not link._open and len(link._pool._free) == num_slots for link in links)


class RouterNode:
    """cluster.router_node, without text."""

    def __init__(self, world: World, host: Host) -> None:
        self.host = host
        self.room = WaitingRoom(world.shape.queue_limit)
        self.directory = Directory(
            Following(world.registry),
            world.shape.stuck_after_s,
            self.room.poke,
            connect=lambda address: world.connect(host, address),
        )
        self.dispatcher = Dispatcher(self.directory, self.room, world.shape.chunk_tokens)
        self.pipeline = Pipeline(self.dispatcher)

    async def serve(self) -> None:
        """Until killed."""
        await self.directory.run()


def worker_info(world: World, role: Role, worker: str, number: int) -> WorkerInfo:
    """Of the incarnation with this number."""
    address = worker if world.shape.same_address else f"{worker}:{number}"
    return WorkerInfo(WorkerId(worker), role, Incarnation(f"{worker}.{number}"), address, 0, card())
