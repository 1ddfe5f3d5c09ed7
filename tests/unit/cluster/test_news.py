"""What `up` says of workers: ready, lost, back, and nothing of one that left."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from cluster import news as module
from cluster.news import News
from pdserve import rpc
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="plain")
CARD = ModelCard("toy", 256, 64, (1,), "f00d", LAYOUT, exact=True)


class Members:
    """Views as the test puts them."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[WorkerInfo, ...]] = asyncio.Queue()

    async def views(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        while True:
            yield await self.queue.get()


class Beating(worker_pb2_grpc.WorkerServiceServicer):
    """Beats, unless it is quiet."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.is_quiet = False

    async def Watch(self, request, context):  # type: ignore[no-untyped-def]
        while True:
            if not self.is_quiet:
                yield worker_pb2.WatchResponse(incarnation=self.incarnation)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def worker(incarnation: str) -> AsyncIterator[tuple[Beating, WorkerInfo, grpc.aio.Server]]:
    servicer, server = Beating(incarnation), rpc.server()  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    address = f"127.0.0.1:{port}"
    yield servicer, WorkerInfo(WorkerId("decode-0"), "decode", Incarnation(incarnation), address, 7, CARD), server
    await server.stop(None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(module, "SILENCE_LIMIT_S", 0.5)


class Following:
    """News that are being followed."""

    def __init__(self) -> None:
        self.members = Members()
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.complete = asyncio.Event()
        self.task = asyncio.create_task(
            News(self.members, 10, self.said.put_nowait).follow({"decode-0"}, self.complete)
        )

    async def next(self) -> str:
        async with asyncio.timeout(10):
            return await self.said.get()


@pytest.fixture
async def following() -> AsyncIterator[Following]:
    running = Following()
    yield running
    running.task.cancel()
    await asyncio.wait([running.task])


async def test_a_worker_that_is_silent_is_lost_and_back_when_it_beats_again(following: Following) -> None:
    async with worker("i1") as (beating, info, _):
        following.members.queue.put_nowait((info,))
        assert await following.next() == f"decode-0 is ready, pid 7, on {info.address}"
        assert following.complete.is_set()
        await asyncio.sleep(0.3)
        beating.is_quiet = True
        assert await following.next() == "lost decode-0: no beat for 0.5 s"
        beating.is_quiet = False
        assert await following.next() == f"decode-0 is back, pid 7, on {info.address}"


async def test_a_killed_worker_is_said_to_be_lost_once_and_back_as_another(following: Following) -> None:
    async with worker("i1") as (_, info, server):
        following.members.queue.put_nowait((info,))
        await following.next()
        await asyncio.sleep(0.3)
        await server.stop(None)
        assert (await following.next()).startswith("lost decode-0: ")
        async with worker("i2") as (_, other, _):
            await asyncio.sleep(0.3)
            following.members.queue.put_nowait((other,))
            assert await following.next() == f"decode-0 is back, pid 7, on {other.address}"


async def test_of_a_worker_that_has_left_nothing_more_is_said(following: Following) -> None:
    async with worker("i1") as (_, info, server):
        following.members.queue.put_nowait((info,))
        await following.next()
        following.members.queue.put_nowait(())
        await asyncio.sleep(0.1)
        await server.stop(None)
        await asyncio.sleep(0.7)
        assert following.said.empty()
