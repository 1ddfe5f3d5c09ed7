"""How a worker ends: drained over the wire, by SIGTERM, or by a part that fails. The registry is a real one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster import drain as module
from cluster import worker_node
from cluster.chaos import Chaos
from cluster.drain import Drain
from cluster.engine_thread import Audit
from cluster.redis_server import RedisServer
from cluster.registry import RegistryMembership
from cluster.worker_node import WorkerServer
from cluster.worker_service import Control
from engine.pages import PageCounts
from pdserve import rpc
from pdserve.config import ClusterConfig, NodeConfig
from pdserve.errors import PdserveError
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.ledger import Ledger, LedgerEntry
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from pdserve.v1.cluster_pb2 import Pages
from pdserve.vitals import Vitals
from transport.base import Own

CARD = ModelCard("toy", 512, 256, (1, 2), "f00d", KvLayout(2, 1, 8, 16, "float32", "v1"), exact=True)
ENTRY = LedgerEntry(7, "one", "pushing", num_pages=2, num_promised=1, router="r", pushes_to=(Incarnation("d"), 3))


class Engine:
    """A worker of one request, and the thread around it."""

    num_requests = 1
    is_stubborn = False  # does not let go

    def submit(self, command: str | PdserveError) -> None:
        self.num_requests = int(self.is_stubborn)

    def vitals(self) -> Vitals:
        return Vitals(1, 0, self.num_requests, 0, 8, 8, 0, 0, 0)

    async def audit(self) -> Audit:
        return Audit(Ledger((ENTRY,), ("a page is lost",)), PageCounts(total=8, free=3, cached=1, in_use=4, promised=2))


@dataclass
class Running:
    """A worker that serves, and a client of it."""

    engine: Engine
    control: Control
    members: RegistryMembership
    stub: Any
    ended: "asyncio.Task[str]"


@asynccontextmanager
async def serving(folder: Path, part: Coroutine[Any, Any, object]) -> AsyncIterator[Running]:
    redis, engine = RedisServer(folder), Engine()
    control = Control(engine, engine, Drain(engine, "refuse", lambda error: error), Chaos(False, None))  # type: ignore[arg-type]
    config = NodeConfig("decode", "decode-0", "test", redis.url, "", "", (), ClusterConfig())
    server = WorkerServer(config, "decode", Own(WorkerId("decode-0"), Incarnation("i"), CARD))
    ended = asyncio.create_task(server.run(control, [], [part]))
    members = RegistryMembership(redis.url, "test")
    try:
        async with rpc.channel(await _address(members)) as channel:
            yield Running(engine, control, members, worker_pb2_grpc.WorkerServiceStub(channel), ended)
    finally:
        ended.cancel()
        await asyncio.wait([ended])
        redis.stop()


async def _address(members: RegistryMembership) -> str:
    async with asyncio.timeout(10):
        async for view in members.views():
            if view:
                return view[0].address
    raise AssertionError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.01)
    monkeypatch.setattr(worker_node, "HANG_UP_S", 0.1)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def outcome(running: Running) -> str:
    async with asyncio.timeout(10):
        return await running.ended


async def test_a_worker_that_is_told_to_drain_says_so_leaves_and_deregisters(tmp_path: Path) -> None:
    async with serving(tmp_path, for_ever()) as running:
        watch = running.stub.Watch(worker_pb2.WatchRequest())
        assert not (await watch.read()).draining
        await running.stub.Drain(worker_pb2.DrainRequest(limit_s=5))
        assert running.control.vitals().draining
        assert await outcome(running) == "drained"
        async with asyncio.timeout(10):
            assert await anext(aiter(running.members.views())) == ()


async def test_sigterm_does_the_same(tmp_path: Path) -> None:
    async with serving(tmp_path, for_ever()) as running:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await outcome(running) == "drained"


async def test_a_part_that_fails_ends_the_worker_with_its_error(tmp_path: Path) -> None:
    failing = asyncio.Event()

    async def part() -> str:
        await failing.wait()
        raise ValueError("broken")

    async with serving(tmp_path, part()) as running:
        failing.set()
        with pytest.raises(ValueError, match="broken"):
            await outcome(running)


async def test_a_worker_that_fails_while_it_drains_does_not_come_back(tmp_path: Path) -> None:
    failing = asyncio.Event()

    async def part() -> str:
        await failing.wait()
        raise ValueError("broken")

    async with serving(tmp_path, part()) as running:
        running.engine.is_stubborn = True
        running.control.drain.begin(60)
        failing.set()
        assert await outcome(running) == "broken"


async def test_the_ledger_crosses_the_wire_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, for_ever()) as running:
        ledger = (await running.stub.GetLedger(worker_pb2.GetLedgerRequest())).ledger
    assert (ledger.id, ledger.role, ledger.incarnation) == ("decode-0", "decode", "i")
    assert ledger.pages == Pages(total=8, free=3, cached=1, in_use=4, promised=2)
    assert list(ledger.problems) == ["a page is lost"]
    (entry,) = ledger.entries
    assert (entry.number, entry.label, entry.state, entry.router) == (7, "one", "pushing", "r")
    assert (entry.pages, entry.promised, entry.ticket_incarnation, entry.ticket) == (2, 1, "d", 3)
