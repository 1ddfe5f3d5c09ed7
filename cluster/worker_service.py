"""The control service of a worker: its beats, its ledger, its way out, and harm on demand."""
# ruff: noqa: N802 (gRPC names its methods so)

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc.aio

from cluster.chaos import Chaos
from cluster.drain import Drain
from cluster.engine_thread import Audit, EngineThread
from pdserve import rpc
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.internal.v1 import worker_pb2 as pb
from pdserve.ledger import LedgerEntry
from pdserve.membership import Role
from pdserve.request import Incarnation, WorkerId
from pdserve.v1 import cluster_pb2
from pdserve.vitals import Vitals, VitalsSource, WatchServicer

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Control:
    """What a worker can be asked and told beside its work."""

    thread: EngineThread[Any]
    source: VitalsSource
    drain: Drain[Any]
    chaos: Chaos

    def vitals(self) -> Vitals:
        """What the source says, and whether the worker is about to leave."""
        return replace(self.source.vitals(), draining=self.drain.is_draining)


class WorkerServicer(WatchServicer):
    """pdserve.internal.v1.WorkerService."""

    def __init__(self, worker: WorkerId, role: Role, incarnation: Incarnation, control: Control) -> None:
        super().__init__(incarnation, control)
        self._worker = worker
        self._role = role
        self._control = control

    async def GetLedger(self, request: pb.GetLedgerRequest, context: _Context) -> pb.GetLedgerResponse:  # noqa: ARG002
        """Who holds which pages, between two steps."""
        async with _reporting(context):
            audit = await self._control.thread.audit()
            return pb.GetLedgerResponse(ledger=self._ledger(audit))

    def _ledger(self, audit: Audit) -> cluster_pb2.WorkerLedger:
        return cluster_pb2.WorkerLedger(
            id=self._worker,
            role=self._role,
            incarnation=self._incarnation,
            pages=cluster_pb2.Pages(**asdict(audit.pages)),
            entries=map(_entry_to_wire, audit.ledger.entries),
            problems=audit.ledger.problems,
        )

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        """Begin to leave."""
        async with _reporting(context):
            if not 0 <= request.limit_s < float("inf"):
                raise InvalidRequest("limit_s", "must be a number of seconds, 0 or more")
            self._control.drain.begin(request.limit_s)
            return pb.DrainResponse()

    async def InflictChaos(self, request: pb.InflictChaosRequest, context: _Context) -> pb.InflictChaosResponse:
        """Harm this worker."""
        async with _reporting(context):
            await self._control.chaos.inflict(request.chaos)
            return pb.InflictChaosResponse()


def _entry_to_wire(entry: LedgerEntry) -> cluster_pb2.LedgerEntry:
    incarnation, counter = entry.pushes_to or ("", 0)
    return cluster_pb2.LedgerEntry(
        number=entry.number,
        label=entry.label,
        state=entry.state,
        router=entry.router,
        pages=entry.num_pages,
        promised=entry.num_promised,
        ticket_incarnation=incarnation,
        ticket=counter,
    )


@asynccontextmanager
async def _reporting(context: _Context) -> AsyncIterator[None]:
    try:
        yield
    except PdserveError as error:
        await rpc.abort(context, error)
