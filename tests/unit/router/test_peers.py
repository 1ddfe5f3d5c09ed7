"""When a worker counts as dead: silence, a stuck engine, another incarnation, a closed stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve import rpc
from pdserve.errors import WorkerLost
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from router.peers import Heartbeat

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_tokens=16, dtype="float32", page_format="toy")
CARD = ModelCard("toy", 512, 512, (2,), "f", LAYOUT, exact=True)


class Beats(worker_pb2_grpc.WorkerServiceServicer):
    """Sends the beats that the test puts; None ends the stream."""

    def __init__(self) -> None:
        self.say: asyncio.Queue[worker_pb2.WatchResponse | None] = asyncio.Queue()

    async def Watch(self, request: worker_pb2.WatchRequest, context: object) -> AsyncIterator[worker_pb2.WatchResponse]:
        while (beat := await self.say.get()) is not None:
            yield beat

    def beat(self, progress: int, busy_ms: int, incarnation: str = "inc") -> None:
        self.say.put_nowait(worker_pb2.WatchResponse(incarnation=incarnation, progress=progress, busy_ms=busy_ms))


@asynccontextmanager
async def listening(stuck_after_s: float = 0.3) -> AsyncIterator[tuple[Heartbeat, Beats]]:
    beats, server = Beats(), rpc.server()  # type: ignore[abstract]  # it is only watched
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(beats, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    info = WorkerInfo(WorkerId("decode-0"), "decode", Incarnation("inc"), f"127.0.0.1:{port}", 1, CARD)
    async with rpc.channel(info.address) as channel:
        heartbeat = Heartbeat(info, channel, stuck_after_s)
        yield heartbeat, beats
        heartbeat.close()
    await server.stop(0)


async def test_beats_in_time_are_life() -> None:
    async with listening() as (heartbeat, beats):
        for progress in range(3):
            beats.beat(progress, busy_ms=900)
            assert (await heartbeat.next()).progress == progress


async def test_silence_is_death() -> None:
    async with listening() as (heartbeat, beats):
        beats.beat(1, 0)
        await heartbeat.next()
        with pytest.raises(WorkerLost, match="no beat for"):
            await heartbeat.next(0.3)


async def test_a_busy_engine_that_does_not_move_is_stuck_and_an_idle_one_is_not() -> None:
    async with listening() as (heartbeat, beats):
        for _ in range(4):
            beats.beat(7, busy_ms=0)
            await heartbeat.next()
            await asyncio.sleep(0.15)
        beats.beat(7, busy_ms=100)
        await heartbeat.next()
        await asyncio.sleep(0.4)
        beats.beat(7, busy_ms=500)
        with pytest.raises(WorkerLost, match="stuck in one layer"):
            await heartbeat.next()


async def test_another_incarnation_at_the_same_address_is_another_worker() -> None:
    async with listening() as (heartbeat, beats):
        beats.beat(1, 0, incarnation="new")
        with pytest.raises(WorkerLost, match="replaced by incarnation new"):
            await heartbeat.next()


async def test_a_closed_stream_is_death() -> None:
    async with listening() as (heartbeat, beats):
        beats.say.put_nowait(None)
        with pytest.raises(WorkerLost, match="closed the stream"):
            await heartbeat.next()
