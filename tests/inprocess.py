"""A whole cluster in one process and event loop: toy engines, loopback links, real gRPC between router and workers.

Engines run in threads as in a worker, or are stepped by the test (`stepped=True`), which then decides what happens
when.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from cluster.engine_thread import EngineThread
from decode_worker.commands import StepUpdate as DecodeUpdate
from decode_worker.service import DecodeServicer, Receiver
from decode_worker.worker import DecodeWorker
from engine.batch import Chunk
from engine.load import Engine
from engine.pilot import pilot_of
from engine.sampler import Step, sample
from pdserve import rpc
from pdserve.internal.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.model_card import ModelCard
from pdserve.request import Incarnation, Token, WorkerId, WorkRequest
from pdserve.vitals import Vitals, WatchServicer
from prefill_worker.commands import StepUpdate as PrefillUpdate
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker
from router.directory import Directory
from router.dispatch import Dispatcher
from router.pipeline import Pipeline
from router.record import RequestRecord
from router.waiting_room import WaitingRoom
from transport.base import LinkConfig, Own
from transport.loopback import Loopback
from transport.receive import DecodeLinks
from transport.send import PrefillLinks


@dataclass
class Members:
    """A membership that the test writes."""

    view: tuple[WorkerInfo, ...] = ()
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, *view: WorkerInfo) -> None:
        self.view = view
        self.changed.set()

    async def views(self) -> AsyncIterator[tuple[WorkerInfo, ...]]:
        while True:
            self.changed.clear()
            yield self.view
            await self.changed.wait()


@dataclass
class PrefillEnd:
    info: WorkerInfo
    worker: PrefillWorker
    links: PrefillLinks
    servicer: PrefillServicer
    thread: EngineThread[PrefillUpdate]
    server: grpc.aio.Server

    def vitals(self) -> Vitals:
        return self.thread.vitals(linked=tuple(self.links.links_up().values()))

    async def step(self) -> None:
        self.servicer.deliver(self.worker.step())
        await settle()


@dataclass
class DecodeEnd:
    info: WorkerInfo
    worker: DecodeWorker
    links: DecodeLinks
    servicer: DecodeServicer
    thread: EngineThread[DecodeUpdate]
    server: grpc.aio.Server

    async def step(self) -> None:
        self.servicer.deliver(self.worker.step())
        await settle()


@dataclass
class InProcess:
    """The parts, for the test to look into."""

    prefills: list[PrefillEnd]
    decodes: list[DecodeEnd]
    loopback: Loopback
    members: Members
    room: WaitingRoom
    directory: Directory
    pipeline: Pipeline
    is_stepped: bool

    async def complete(self, work: WorkRequest, record: RequestRecord | None = None) -> list[Token]:
        """The whole completion."""
        record = record or RequestRecord(arrived=0.0)
        return [token async for token in self.pipeline.generate(work, 0, record)]

    def is_clean(self) -> bool:
        """Whether nobody holds anything."""
        workers: list[PrefillWorker | DecodeWorker] = [
            *(end.worker for end in self.prefills),
            *(end.worker for end in self.decodes),
        ]
        counts = [worker.page_counts() for worker in workers]
        requests = sum(worker.num_requests for worker in workers)
        return requests == 0 and all(each.in_use == 0 and each.promised == 0 for each in counts)

    async def assert_clean(self) -> None:
        """Within a few seconds: a release may still be under way. And no ledger ever said that something is wrong."""
        async with asyncio.timeout(5):
            while not self.is_clean():
                await asyncio.sleep(0.01)
        ends: list[PrefillEnd | DecodeEnd] = [*self.prefills, *self.decodes]
        for end in ends:
            ledger = end.worker.ledger() if self.is_stepped else (await end.thread.audit()).ledger
            assert ledger.problems == ()
        assert len(self.room) == 0
        assert self.pipeline.num_running == 0


def reference(engine: Engine, work: WorkRequest) -> list[Token]:
    """The same completion by one engine that serves nobody else: the whole prompt at once, then token by token."""
    pages = list(range(engine.card.kv_layout.pages_for(work.max_length)))
    pilot = pilot_of(work, engine.card.vocab_size, engine.grammars)
    chunk, tokens = Chunk(work.token_ids, 0, pages, sample=True), list[Token]()
    while not (tokens and tokens[-1].finish):
        step = Step(work, work.num_emitted + len(tokens), pilot)
        (token,) = sample(engine.runner.run([chunk]), [step])
        tokens.append(token if pilot is None else pilot.take(token))
        chunk = Chunk([token.token_id], step.position, pages, sample=True)
    return tokens


async def settle() -> None:
    """Let messages that are under way arrive."""
    for _ in range(5):
        await asyncio.sleep(0.004)


@asynccontextmanager
async def in_process(
    prefills: Sequence[Engine],
    decodes: Sequence[Engine],
    *,
    chunk_tokens: int = 64,
    stepped: bool = False,
    slot_bytes: int = 65536,
    verify_kv: bool = True,
) -> AsyncIterator[InProcess]:
    """One worker per engine, all connected and serving."""
    config = LinkConfig(slot_bytes=slot_bytes, op_timeout_s=2.0)
    loopback, members, room = Loopback(config), Members(), WaitingRoom(64)
    async with AsyncExitStack() as stack:
        decode_ends = [await _decode_end(stack, i, engine, config, loopback) for i, engine in enumerate(decodes)]
        prefill_ends = []
        for number, engine in enumerate(prefills):
            worker = PrefillWorker(engine, chunk_tokens, slot_bytes, verify_kv=verify_kv)
            prefill_ends.append(await _prefill_end(stack, number, engine.card, worker, config, loopback))
        threads: list[EngineThread[Any]] = [end.thread for end in prefill_ends] + [end.thread for end in decode_ends]
        for thread in threads if not stepped else []:
            thread.start()
            stack.push_async_callback(thread.stop)
        for prefill in prefill_ends:
            for decode in decode_ends:
                prefill.links.connect(decode.info)
                await prefill.links.wait_up(decode.info.id, 2)
        members.set(*(end.info for end in prefill_ends), *(end.info for end in decode_ends))
        directory = Directory(members, stuck_after_s=5.0, on_change=room.poke)
        await _background(stack, directory.run())
        async with asyncio.timeout(5):
            while len(directory.prefills) + len(directory.decodes) < len(prefill_ends) + len(decode_ends):
                await asyncio.sleep(0.01)
        pipeline = Pipeline(Dispatcher(directory, room, chunk_tokens))
        yield InProcess(prefill_ends, decode_ends, loopback, members, room, directory, pipeline, stepped)


async def _background(stack: AsyncExitStack, work: object) -> None:
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]

    async def end() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(end)


async def _serve(stack: AsyncExitStack, server: grpc.aio.Server) -> str:
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return f"127.0.0.1:{port}"


async def _decode_end(
    stack: AsyncExitStack, number: int, engine: Engine, config: LinkConfig, loopback: Loopback
) -> DecodeEnd:
    own = Own(WorkerId(f"decode-{number}"), Incarnation(f"d{number}"), engine.card)
    worker = DecodeWorker(engine, own.worker, own.incarnation, max_batch=64)
    links = DecodeLinks(own, config, loopback)
    receiver = Receiver(worker.submit, worker.is_live, links)
    servicer, server = DecodeServicer(worker.submit, receiver), rpc.server()
    thread: EngineThread[DecodeUpdate] = EngineThread(worker, servicer.deliver)
    loopback.add(own.worker, links)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    watch = WatchServicer(own.incarnation, thread)  # type: ignore[abstract]  # nobody drains it or asks for its ledger
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(watch, server)
    info = WorkerInfo(own.worker, "decode", own.incarnation, await _serve(stack, server), 0, engine.card)
    stack.push_async_callback(links.close)
    await _background(stack, receiver.run())
    return DecodeEnd(info, worker, links, servicer, thread, server)


async def _prefill_end(
    stack: AsyncExitStack, number: int, card: ModelCard, worker: PrefillWorker, config: LinkConfig, loopback: Loopback
) -> PrefillEnd:
    own = Own(WorkerId(f"prefill-{number}"), Incarnation(f"p{number}"), card)
    links = PrefillLinks(own, config, loopback, loopback)
    servicer, server = PrefillServicer(worker.submit, links), rpc.server()
    thread: EngineThread[PrefillUpdate] = EngineThread(worker, servicer.deliver)
    end = PrefillEnd(
        WorkerInfo(own.worker, "prefill", own.incarnation, "", 0, card), worker, links, servicer, thread, server
    )
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    watch = WatchServicer(own.incarnation, end)  # type: ignore[abstract]  # nobody drains it or asks for its ledger
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(watch, server)
    end.info = WorkerInfo(own.worker, "prefill", own.incarnation, await _serve(stack, server), 0, card)
    stack.push_async_callback(links.close)
    await _background(stack, servicer.watch_aborts())
    return end
