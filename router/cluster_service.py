"""The other public gRPC service of a router: what the cluster looks like from here, and commands for its workers.

A command's life: a client names a worker -> the router looks it up among the members -> the worker's own
WorkerService obeys or refuses -> its answer, or its typed error, goes back to the client.
"""
# ruff: noqa: N802 (gRPC names its methods so)

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import grpc.aio

from pdserve import rpc
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc
from router import call

WORKER_LIMIT_S = 2.0  # for a worker to answer
LEDGER_LIMIT_S = WORKER_LIMIT_S + 0.5  # its engine has two seconds of that: the worker's own error says more
DRAIN_LIMIT_S = 30.0


class View(Protocol):
    """The router's view of the cluster."""

    @property
    def router(self) -> str:
        """This router's name in the ledgers of workers."""
        ...

    def status(self) -> pb.GetStatusResponse:
        """Workers and queue, as they are known now."""
        ...

    def members(self) -> Sequence[WorkerInfo]:
        """All workers that have not left, whether alive or not."""
        ...

    def held(self) -> Sequence[pb.HeldTicket]:
        """The tickets that this router holds."""
        ...


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """pdserve.v1.ClusterService."""

    def __init__(self, view: View, connect: Callable[[str], grpc.aio.Channel] = rpc.channel) -> None:
        self._view = view
        self._connect = connect
        self._leaving: set[str] = set()  # incarnations that were told to: a second drain must not wait for their beats

    async def GetStatus(self, request: pb.GetStatusRequest, context: call.Context) -> pb.GetStatusResponse:  # noqa: ARG002
        """The cluster as this router sees it."""
        async with call.reporting(context, "GetStatus"):
            return self._view.status()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: call.Context) -> pb.DrainWorkerResponse:
        """Let a worker leave; the last of its role only by force."""
        async with call.reporting(context, "DrainWorker"), self._worker(request.worker) as worker:
            leaving = self._heard(request.worker)
            if not request.force:
                self._check_spare(leaving)
            limit_s = request.limit_s if request.HasField("limit_s") else DRAIN_LIMIT_S
            await self._begin_drain(worker, leaving, limit_s)
            return pb.DrainWorkerResponse(incarnation=leaving.incarnation, requests=leaving.load.requests)

    async def _begin_drain(
        self, worker: "worker_pb2_grpc.WorkerServiceAsyncStub", leaving: pb.WorkerStatus, limit_s: float
    ) -> None:
        try:
            await worker.Drain(worker_pb2.DrainRequest(limit_s=limit_s), timeout=WORKER_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            self._leaving.discard(leaving.incarnation)
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            may = "it may obey later: look at `pdserve status`, and try again"
            raise Unavailable(f"{leaving.id} does not answer; {may}") from None

    def _heard(self, name: str) -> pb.WorkerStatus:
        """A member as it was last heard. Raises Unavailable while it is silent: it would obey much later, or never."""
        for worker in self._view.status().workers:
            if worker.id == name:
                return worker
        problem = "is there, but silent: it stands still, or was lost and is being started again"
        raise Unavailable(f"{name} {problem}; wait until `pdserve status` shows it at work, and try again")

    def _check_spare(self, leaving: pb.WorkerStatus) -> None:
        """Raises InvalidRequest unless another worker of this role stays; if one does, `leaving` counts as leaving."""
        name, role = leaving.id, leaving.role
        others = [worker for worker in self._view.status().workers if worker.role == role and worker.id != name]
        if not any(not worker.draining and worker.incarnation not in self._leaving for worker in others):
            raise InvalidRequest("worker", f"{name} is the last {role} worker; force (--force) drains it all the same")
        self._leaving = {worker.incarnation for worker in others} & self._leaving | {leaving.incarnation}

    async def InflictChaos(self, request: pb.InflictChaosRequest, context: call.Context) -> pb.InflictChaosResponse:
        """Harm a worker."""
        async with call.reporting(context, "InflictChaos"), self._worker(request.worker) as worker:
            await worker.InflictChaos(worker_pb2.InflictChaosRequest(chaos=request.chaos), timeout=WORKER_LIMIT_S)
            return pb.InflictChaosResponse()

    async def GetLedger(self, request: pb.GetLedgerRequest, context: call.Context) -> pb.GetLedgerResponse:  # noqa: ARG002
        """Every worker's ledger, all asked at once, and this router's tickets."""
        async with call.reporting(context, "GetLedger"):
            answers = await asyncio.gather(*map(self._ledger, self._view.members()))
            return pb.GetLedgerResponse(
                router=self._view.router,
                workers=[answer for answer in answers if not isinstance(answer, str)],
                held=self._view.held(),
                problems=[answer for answer in answers if isinstance(answer, str)],
            )

    async def _ledger(self, info: WorkerInfo) -> pb.WorkerLedger | str:
        """Its ledger, or why there is none."""
        try:
            async with self._called(info) as worker:
                return (await worker.GetLedger(worker_pb2.GetLedgerRequest(), timeout=LEDGER_LIMIT_S)).ledger
        except PdserveError as error:
            return str(error)

    @asynccontextmanager
    async def _worker(self, name: str) -> "AsyncIterator[worker_pb2_grpc.WorkerServiceAsyncStub]":
        members = {str(info.id): info for info in self._view.members()}
        if name not in members:
            raise InvalidRequest("worker", f"{name!r} is not there; there are: {', '.join(sorted(members)) or 'none'}")
        async with self._called(members[name]) as worker:
            yield worker

    @asynccontextmanager
    async def _called(self, info: WorkerInfo) -> "AsyncIterator[worker_pb2_grpc.WorkerServiceAsyncStub]":
        """A worker on a connection of its own. Raises what it answers, and Unavailable when it does not."""
        async with self._connect(info.address) as channel:
            try:
                yield worker_pb2_grpc.WorkerServiceStub(channel)
            except grpc.aio.AioRpcError as error:
                raise _named(info.id, error) from None


def _named(worker: str, error: grpc.aio.AioRpcError) -> PdserveError:
    """The worker's own error; where it gave none, what is wrong with the worker."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"{worker} does not answer")
    typed = rpc.error_of(error)
    return Unavailable(f"{worker}: {typed}") if type(typed) is Unavailable else typed
