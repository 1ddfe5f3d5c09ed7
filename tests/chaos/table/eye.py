"""Where requests are, seen from outside: workers' ledgers, asked directly, and the router's table of workers.

A look's life: every worker says at once what it holds, between two of its steps -> the entries of a label, from both
roles, are its place -> `Place.state` reads the state from them, or None where they leave it open.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from pdserve import rpc
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc
from tests.chaos.table.cells import State

POLL_S = 0.02
LEDGER_LIMIT_S = 2.0
CALL_LIMIT_S = 5.0


@dataclass(frozen=True)
class Entry:
    """A ledger entry, and the worker that has it."""

    worker: str
    said: pb.LedgerEntry


@dataclass(frozen=True)
class Place:
    """Where one request was at one moment; on neither worker: in the router."""

    prefill: Entry | None = None
    decode: Entry | None = None

    def state(self) -> State | None:
        """Of a request that runs and has been resumed by nobody yet."""
        if self.decode and self.decode.said.state == "running":
            return "decoding"
        if self.prefill is None:
            return "queued" if self.decode is None else None
        match self.prefill.said.state:
            case "queued":
                return "queued"
            case "computing":
                return "prefilling"
            case _:
                # "pushing": not every payload is acknowledged; "landing": one is
                return "transferring" if self.decode and self.decode.said.state == "landing" else None

    def is_on(self, worker: str) -> bool:
        """Whether the worker has a part of it."""
        return worker in {entry.worker for entry in (self.prefill, self.decode) if entry}


@dataclass(frozen=True)
class Look:
    """All places at one moment: no worker answered before `began`."""

    began: float
    places: dict[str, Place]
    in_use: int = 0  # pages, promised ones included

    def place(self, label: str) -> Place:
        """Of a request; the router's, when no worker knows it."""
        return self.places.get(label, Place())


@dataclass
class Eye:
    """Connections to one cluster; `meet` again after workers were replaced."""

    address: str
    service: "cluster_pb2_grpc.ClusterServiceAsyncStub"
    workers: dict[str, pb.WorkerStatus] = field(default_factory=dict)
    _stubs: "dict[str, worker_pb2_grpc.WorkerServiceAsyncStub]" = field(default_factory=dict)
    _channels: list[grpc.aio.Channel] = field(default_factory=list)

    async def status(self) -> pb.GetStatusResponse | None:
        """What the router sees; None when it does not answer."""
        try:
            return await self.service.GetStatus(pb.GetStatusRequest(), timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError:
            return None

    async def meet(self) -> None:
        """Connect to the workers that are there now."""
        await self.close()
        status = await self.service.GetStatus(pb.GetStatusRequest(), timeout=CALL_LIMIT_S)
        self.workers = {worker.id: worker for worker in status.workers}
        for worker in status.workers:
            self._channels.append(rpc.channel(worker.address))
            self._stubs[worker.id] = worker_pb2_grpc.WorkerServiceStub(self._channels[-1])
        await self.look()  # connects

    async def close(self) -> None:
        """Hang up on all workers."""
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        self._stubs.clear()

    def of_role(self, role: str) -> list[str]:
        """Names of workers."""
        return sorted(name for name, worker in self.workers.items() if worker.role == role)

    async def look(self) -> Look:
        """Ask all workers. Raises AioRpcError when one does not answer."""
        began = time.monotonic()
        ledgers = await asyncio.gather(*map(self._ledger, self._stubs.values()))
        return Look(began, _places(ledgers), sum(each.pages.in_use + each.pages.promised for each in ledgers))

    async def _ledger(self, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> pb.WorkerLedger:
        answer = await stub.GetLedger(worker_pb2.GetLedgerRequest(), timeout=LEDGER_LIMIT_S)
        return answer.ledger

    async def inflict(self, workers: Sequence[str], chaos: pb.Chaos) -> None:
        """Harm workers directly: a fault must not wait for the router."""
        request = worker_pb2.InflictChaosRequest(chaos=chaos)
        await asyncio.gather(*(self._stubs[name].InflictChaos(request, timeout=CALL_LIMIT_S) for name in workers))

    async def seen_after(self, since: float, limit_s: float, holds: Callable[[pb.GetStatusResponse], bool]) -> float:
        """Seconds from `since` to the first status for which it holds; infinity when there is none in time."""
        while time.monotonic() < since + limit_s:
            status = await self.status()
            if status is not None and holds(status):
                return time.monotonic() - since
            await asyncio.sleep(POLL_S)
        return float("inf")


def _places(ledgers: Sequence[pb.WorkerLedger]) -> dict[str, Place]:
    places: dict[str, dict[str, Any]] = {}
    for ledger in ledgers:
        for said in ledger.entries:
            places.setdefault(said.label, {})[ledger.role] = Entry(ledger.id, said)
    return {label: Place(**entries) for label, entries in places.items()}


@asynccontextmanager
async def watching(address: str) -> AsyncIterator[Eye]:
    """An eye on the cluster of this router."""
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(rpc.client_channel(address))
        eye = Eye(address, cluster_pb2_grpc.ClusterServiceStub(channel))
        stack.push_async_callback(eye.close)
        await eye.meet()
        yield eye
