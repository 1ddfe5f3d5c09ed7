"""`pdserve drain`, `chaos` and `kv audit` against a router of canned answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster import audit, control
from cluster.flags import AuditFlags, ChaosFlags, DrainFlags, Harm
from pdserve import rpc
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc


class Router(cluster_pb2_grpc.ClusterServiceServicer):
    """Two decode workers and a prefill worker; a drained one is there for two more looks."""

    def __init__(self) -> None:
        self.workers = [
            pb.WorkerStatus(id=id, role=id.split("-")[0], incarnation=id)
            for id in ("decode-0", "decode-1", "prefill-0")
        ]
        self.comes_back = False
        self.drained: pb.DrainWorkerRequest | None = None
        self.looks = 0
        self.harm: pb.InflictChaosRequest | None = None
        self.ledgers: list[pb.GetLedgerResponse] = []

    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]
        self.looks += self.drained is not None
        if self.drained is not None and self.looks == 3:
            self.workers = [worker for worker in self.workers if worker.id != self.drained.worker]
        return pb.GetStatusResponse(workers=self.workers)

    async def DrainWorker(self, request, context):  # type: ignore[no-untyped-def]
        self.drained = request
        for worker in self.workers:
            if worker.id == request.worker:
                worker.draining = True
                worker.incarnation += "*" if self.comes_back else ""
        return pb.DrainWorkerResponse()

    async def InflictChaos(self, request, context):  # type: ignore[no-untyped-def]
        self.harm = request
        return pb.InflictChaosResponse()

    async def GetLedger(self, request, context):  # type: ignore[no-untyped-def]
        return self.ledgers.pop(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "POLL_S", 0.01)
    monkeypatch.setattr(audit, "SAMPLE_INTERVAL_S", 0.01)


@pytest.fixture
async def serving() -> AsyncIterator[tuple[Router, str]]:
    router, server = Router(), rpc.server()
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(router, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    yield router, f"127.0.0.1:{port}"
    await server.stop(None)


Serving = tuple[Router, str]


async def test_drain_waits_until_the_worker_has_left(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    router, address = serving
    await asyncio.to_thread(control.drain, DrainFlags("decode-1", limit_s=4, address=address))
    assert router.drained == pb.DrainWorkerRequest(worker="decode-1", limit_s=4)
    assert router.looks == 3
    began, left = capsys.readouterr().out.splitlines()
    assert began == "decode-1 takes no new work; 0 requests have 4 s to finish"
    assert left.startswith("decode-1 has left after 0.")


async def test_an_unknown_worker_is_an_error_that_names_the_others(serving: Serving) -> None:
    with pytest.raises(InvalidRequest, match="'decode-7' is not there; there are: decode-0, decode-1, prefill-0"):
        await asyncio.to_thread(control.drain, DrainFlags("decode-7", address=serving[1]))


async def test_force_is_passed_on(serving: Serving) -> None:
    router, address = serving
    await asyncio.to_thread(control.drain, DrainFlags("prefill-0", address=address, force=True))
    assert router.drained is not None
    assert router.drained.force


async def test_a_worker_that_was_killed_meanwhile_has_not_left(serving: Serving) -> None:
    router, address = serving
    router.comes_back = True
    with pytest.raises(Unavailable, match="died before it had drained"):
        await asyncio.to_thread(control.drain, DrainFlags("decode-1", address=address))


async def test_a_worker_that_stays_is_an_error(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    router, address = serving
    router.looks = 3
    monkeypatch.setattr(control, "LEAVE_LIMIT_S", 0.2)
    with pytest.raises(Unavailable, match=r"decode-1 is still there after 0\.2 s"):
        await asyncio.to_thread(control.drain, DrainFlags("decode-1", limit_s=0, address=address))


@pytest.mark.parametrize(
    ("harm", "sent"),
    [
        (Harm.KILL, pb.Chaos(kill=True)),
        (Harm.STOP, pb.Chaos(stop_s=2)),
        (Harm.CUT, pb.Chaos(cut=True)),
        (Harm.SLOW, pb.Chaos(slow=pb.Slow(bytes_per_s=5, for_s=2))),
    ],
)
async def test_chaos_is_sent(serving: Serving, harm: Harm, sent: pb.Chaos) -> None:
    router, address = serving
    await asyncio.to_thread(control.chaos, ChaosFlags(harm, "decode-0", for_s=2, bytes_per_s=5, address=address))
    assert router.harm == pb.InflictChaosRequest(worker="decode-0", chaos=sent)


async def test_the_audit_asks_again_only_while_something_is_wrong(serving: Serving) -> None:
    router, address = serving
    fine = pb.GetLedgerResponse(router="r")
    wrong = pb.GetLedgerResponse(router="r", workers=[pb.WorkerLedger(id="decode-0", pages=pb.Pages(total=1))])
    for ledgers, is_clean, num_left in (
        ([fine, wrong], True, 1),
        ([wrong, fine, wrong], True, 1),
        ([wrong, wrong, wrong, fine], False, 1),
    ):
        router.ledgers = list(ledgers)
        assert await asyncio.to_thread(audit.audit, AuditFlags(address=[address])) is is_clean
        assert len(router.ledgers) == num_left
