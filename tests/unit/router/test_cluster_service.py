"""The cluster's service through real gRPC servers: what workers answer, refuse, or do not answer at all."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from pdserve import rpc
from pdserve.errors import InvalidRequest
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc
from router import cluster_service
from router.cluster_service import ClusterServicer

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="plain")
CARD = ModelCard("toy", 256, 64, (1,), "f00d", LAYOUT, exact=True)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Keeps what it is told; its ledger has one problem; harm it refuses."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def Watch(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetLedger(self, request: Any, context: Any) -> worker_pb2.GetLedgerResponse:
        return worker_pb2.GetLedgerResponse(ledger=pb.WorkerLedger(id="decode-0", problems=["a page is lost"]))

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        self.limits.append(request.limit_s)
        return worker_pb2.DrainResponse()

    async def InflictChaos(self, request: Any, context: Any) -> worker_pb2.InflictChaosResponse:
        await rpc.abort(context, InvalidRequest("chaos", "refused"))


class Silent(Worker):
    """Takes calls and never answers."""

    async def GetLedger(self, request: Any, context: Any) -> worker_pb2.GetLedgerResponse:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        return await asyncio.Event().wait()  # type: ignore[return-value]


@dataclass
class View:
    """What the router knows."""

    infos: list[WorkerInfo] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    router: str = "router-1"

    def status(self) -> pb.GetStatusResponse:
        workers = [
            pb.WorkerStatus(id=info.id, role=info.role, incarnation=info.incarnation, load=pb.Load(requests=4))
            for info in self.infos
            if info.id not in self.silent
        ]
        return pb.GetStatusResponse(workers=workers, queued_requests=3)

    def members(self) -> Sequence[WorkerInfo]:
        return self.infos

    def held(self) -> Sequence[pb.HeldTicket]:
        return [pb.HeldTicket(worker="decode-0", counter=5)]


@dataclass
class Cluster:
    """A router of this view, and a client of it."""

    view: View
    stub: Any
    worker: Worker

    def add(self, name: str, address: str) -> None:
        self.view.infos.append(WorkerInfo(WorkerId(name), "decode", Incarnation(name), address, 1, CARD))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    view, worker = View(), Worker()
    workers, router = rpc.server(), rpc.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, workers)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterServicer(view), router)
    ports = [rpc.listen(server, "127.0.0.1", 0) for server in (workers, router)]
    await workers.start()
    await router.start()
    async with rpc.channel(f"127.0.0.1:{ports[1]}") as channel:
        running = Cluster(view, cluster_pb2_grpc.ClusterServiceStub(channel), worker)
        running.add("decode-0", f"127.0.0.1:{ports[0]}")
        yield running
    await router.stop(None)
    await workers.stop(None)


async def error_of(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        typed = rpc.error_of(error)
        return f"{type(typed).__name__}: {typed}"
    raise AssertionError("no error")


async def test_status(cluster: Cluster) -> None:
    assert (await cluster.stub.GetStatus(pb.GetStatusRequest())).queued_requests == 3


async def test_a_worker_is_told_to_drain(cluster: Cluster) -> None:
    cluster.add("decode-1", "127.0.0.1:1")
    told = await cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-0"))
    assert told == pb.DrainWorkerResponse(incarnation="decode-0", requests=4)
    await cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-0", limit_s=0))
    assert cluster.worker.limits == [cluster_service.DRAIN_LIMIT_S, 0]


async def test_the_last_of_a_role_takes_force(cluster: Cluster) -> None:
    last = pb.DrainWorkerRequest(worker="decode-0", limit_s=1)
    assert "decode-0 is the last decode worker" in await error_of(cluster.stub.DrainWorker(last))
    last.force = True
    await cluster.stub.DrainWorker(last)
    assert cluster.worker.limits == [1]


async def test_who_was_told_to_leave_does_not_stay_though_its_beats_do_not_say_so_yet(cluster: Cluster) -> None:
    cluster.add("decode-1", cluster.view.infos[0].address)
    await cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-0"))
    error = await error_of(cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-1")))
    assert "decode-1 is the last decode worker" in error
    await cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-0", limit_s=0))  # once more is no harm
    assert len(cluster.worker.limits) == 2


async def test_a_silent_worker_is_there_and_told_nothing(cluster: Cluster) -> None:
    cluster.add("decode-1", "127.0.0.1:1")
    cluster.view.silent.add("decode-0")
    error = await error_of(cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-0", force=True)))
    assert error.startswith("Unavailable: decode-0 is there, but silent: it stands still, or was lost and is being")
    assert error.endswith("and try again")
    assert cluster.worker.limits == []


async def test_a_worker_that_did_not_obey_does_not_count_as_leaving(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_service, "WORKER_LIMIT_S", 0.3)
    silent, server = Silent(), rpc.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(silent, server)
    cluster.add("decode-1", f"127.0.0.1:{rpc.listen(server, '127.0.0.1', 0)}")
    await server.start()
    error = await error_of(cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-1")))
    assert error.startswith("Unavailable: decode-1 does not answer; it may obey later: ")
    await cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-0", limit_s=1))
    await server.stop(None)
    assert cluster.worker.limits == [1]


async def test_a_worker_that_is_not_there_is_named_with_those_that_are(cluster: Cluster) -> None:
    error = await error_of(cluster.stub.DrainWorker(pb.DrainWorkerRequest(worker="decode-7")))
    assert error == "InvalidRequest: worker: 'decode-7' is not there; there are: decode-0"


async def test_the_refusal_of_a_worker_is_passed_on(cluster: Cluster) -> None:
    error = await error_of(cluster.stub.InflictChaos(pb.InflictChaosRequest(worker="decode-0")))
    assert error == "InvalidRequest: chaos: refused"


async def test_the_ledger_names_who_does_not_answer(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_service, "LEDGER_LIMIT_S", 0.3)
    silent, server = Silent(), rpc.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(silent, server)
    cluster.add("decode-1", f"127.0.0.1:{rpc.listen(server, '127.0.0.1', 0)}")
    cluster.add("decode-2", "127.0.0.1:1")
    await server.start()
    answer = await cluster.stub.GetLedger(pb.GetLedgerRequest())
    await server.stop(None)
    assert (answer.router, [worker.id for worker in answer.workers]) == ("router-1", ["decode-0"])
    assert list(answer.workers[0].problems) == ["a page is lost"]
    assert [ticket.counter for ticket in answer.held] == [5]
    silent_problem, dead_problem = answer.problems
    assert silent_problem == "decode-1 does not answer"
    assert dead_problem.startswith("decode-2: ")
