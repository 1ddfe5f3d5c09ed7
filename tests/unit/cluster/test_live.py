"""Shares of a machine's limits, and how they reach `status`: from a worker's engine to the columns of the table."""

from dataclasses import dataclass

import pytest

from cluster.live import live
from cluster.meter import Meter
from cluster.status import table, to_plain
from engine.tally import Tally
from pdserve.request import Incarnation
from pdserve.speed import Limits, Work
from pdserve.v1 import cluster_pb2 as pb
from pdserve.vitals import Vitals, beat_to_wire

LIMITS = pb.Limits(read_bytes_per_s=10e9, flops_per_s=100e9)
RECENT = pb.Work(clock_s=5, busy_s=4, passes=100, tokens=800, flops=100e9, read_bytes=30e9)


def worker(recent: pb.Work = RECENT, limits: pb.Limits | None = LIMITS) -> pb.WorkerStatus:
    return pb.WorkerStatus(id="decode-0", role="decode", recent=recent, limits=limits)


def test_shares_are_those_of_the_busy_time() -> None:
    found = live(worker())
    assert found is not None
    assert (found.worker, found.role, found.span_s, found.busy) == ("decode-0", "decode", 5, 0.8)
    assert (found.tokens_per_s, found.pass_tokens, found.pass_ms) == (160, 8, 40)
    assert [found.mfu, found.mbu] == pytest.approx([0.25, 0.75])
    assert found.of_floor == pytest.approx(0.75)


def test_a_pass_that_outlasts_the_span_still_counts() -> None:
    found = live(worker(pb.Work(clock_s=5, busy_s=5, flops=250e9, read_bytes=1e9)))
    assert found is not None
    assert (found.busy, found.mfu, found.pass_ms, found.pass_tokens) == (1, 0.5, None, None)


def test_given_limits_win() -> None:
    found = live(worker(), Limits(read_bytes_per_s=20e9, flops_per_s=50e9))
    assert found is not None
    assert [found.mfu, found.mbu] == pytest.approx([0.5, 0.375])


@pytest.mark.parametrize(
    "idle", [worker(pb.Work(clock_s=5, busy_s=0.01)), worker(limits=None), worker(pb.Work()), pb.WorkerStatus()]
)
def test_without_work_or_limits_there_are_no_shares(idle: pb.WorkerStatus) -> None:
    assert live(idle) is None
    assert table(pb.GetStatusResponse(workers=[idle])).splitlines()[1].count(" -") == 3


def test_status_has_them_as_columns_and_in_json() -> None:
    response = pb.GetStatusResponse(workers=[worker()])
    head, row, _ = table(response).splitlines()
    places = [head.index(name) for name in ("BUSY", "MFU", "MBU")]
    assert [row[place:].split("  ")[0] for place in places] == ["80 %", "25 %", "75 %"]
    plain = to_plain(response)["workers"][0]
    assert (plain["recent"]["passes"], plain["limits"]["flops_per_s"], plain["work"]["tokens"]) == (100, 100e9, 0)


@dataclass
class Source:
    """Vitals without counters, and the thread around them."""

    def vitals(self) -> Vitals:
        return Vitals(1, 0, 2, 0, 8, 8, 0, 0, 0, draining=True)

    def busy_s(self) -> float:
        return 2.5


def test_a_beat_carries_the_counters_and_the_limits() -> None:
    source, tally, whole = Source(), Tally(num_layers=2), Work(passes=1, tokens=3, flops=10, read_bytes=20)
    for _ in range(2):
        tally.layer_done(whole)
    tally.pass_done(whole)
    meter = Meter(source, source, tally, Limits(3.0, 4.0))  # type: ignore[arg-type]
    beat = beat_to_wire(Incarnation("i"), meter.vitals())
    assert (beat.load.requests, beat.draining) == (2, True)
    assert beat.work == pb.Work(clock_s=beat.work.clock_s, busy_s=2.5, passes=1, tokens=3, flops=10, read_bytes=20)
    assert beat.work.clock_s > 0
    assert beat.limits == pb.Limits(read_bytes_per_s=3, flops_per_s=4)
    assert not beat_to_wire(Incarnation("i"), source.vitals()).HasField("limits")
