"""`pdserve drain`, `chaos` and `kv audit` against a router of canned answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster import audit, control
from cluster.flags import AuditFlags, ChaosFlags, DrainFlags, Harm
from pdserve import rpc
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc


class Router(cluster_pb2_grpc.ClusterServiceServicer):
    """Two decode workers and a prefill worker; what it says after a drain is `after`, look by look, the last for ever.

    Each look is the drained worker's incarnation, "silent", or "left".
    """

    def __init__(self) -> None:
        self.workers = [
            pb.WorkerStatus(id=id, role=id.split("-")[0], incarnation=id, load=pb.Load(requests=7))
            for id in ("decode-0", "decode-1", "prefill-0")
        ]
        self.after: list[str] = ["left"]
        self.refusal: PdserveError | None = None
        self.drained: pb.DrainWorkerRequest | None = None
        self.harm: pb.InflictChaosRequest | None = None
        self.ledgers: list[pb.GetLedgerResponse] = []

    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]
        assert self.drained is not None
        name, look = self.drained.worker, self.after.pop(0) if len(self.after) > 1 else self.after[0]
        workers = [worker for worker in self.workers if worker.id != name]
        if look not in ("left", "silent"):
            workers.append(pb.WorkerStatus(id=name, incarnation=look, draining=look == name))
        return pb.GetStatusResponse(workers=workers, silent=[name] if look == "silent" else [])

    async def DrainWorker(self, request, context):  # type: ignore[no-untyped-def]
        if self.refusal is not None:
            await rpc.abort(context, self.refusal)
        self.drained = request
        return pb.DrainWorkerResponse(incarnation=request.worker, requests=7)

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
    router.after = ["decode-1", "decode-1", "silent", "decode-1", "left"]
    await asyncio.to_thread(control.drain, DrainFlags("decode-1", limit_s=4, address=address))
    assert router.drained == pb.DrainWorkerRequest(worker="decode-1", limit_s=4)
    assert router.after == ["left"]
    began, left = capsys.readouterr().out.splitlines()
    assert began == "decode-1 takes no new work; 7 requests have 4 s to finish"
    assert left.startswith("decode-1 has left after 0.")


@pytest.mark.parametrize("refusal", [InvalidRequest("worker", "is not there"), Unavailable("is there, but silent")])
async def test_what_the_router_refuses_is_an_error(serving: Serving, refusal: PdserveError) -> None:
    router, address = serving
    router.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        await asyncio.to_thread(control.drain, DrainFlags("decode-7", address=address))


async def test_force_is_passed_on(serving: Serving) -> None:
    router, address = serving
    await asyncio.to_thread(control.drain, DrainFlags("prefill-0", address=address, force=True))
    assert router.drained is not None
    assert router.drained.force


async def test_a_worker_that_was_killed_meanwhile_has_not_left(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    router, address = serving
    router.after = ["decode-1", *["silent"] * 3, "another incarnation"]
    with pytest.raises(Unavailable, match="decode-1 was lost before it had drained, and has been started again"):
        await asyncio.to_thread(control.drain, DrainFlags("decode-1", address=address))
    assert "has left" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last", "state"), [("decode-1", "still there"), ("silent", "silent, it stands still or was lost")]
)
async def test_a_worker_that_has_not_left_in_time_is_an_error(
    serving: Serving, last: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, address = serving
    router.after = [last]
    monkeypatch.setattr(control, "LEAVE_LIMIT_S", 0.2)
    with pytest.raises(Unavailable, match=rf"decode-1 is {state}.* after 0\.2 s"):
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
