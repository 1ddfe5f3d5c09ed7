"""The failure table: what it counts as a hit and as a fault, and two of its cells on a real cluster."""

import signal
from pathlib import Path

import pytest

from pdserve.v1 import cluster_pb2
from pdserve.v1 import generation_pb2 as pb
from tests.chaos.table.campaign import Campaign, programme, toy_plan
from tests.chaos.table.cells import (
    DECODE_KILLED,
    DECODE_STOPPED,
    GCS_GONE,
    LINK_CUT,
    PREFILL_KILLED,
    PREFILL_STOPPED,
    REDIS_GONE,
    Cell,
    State,
    Victim,
    select,
)
from tests.chaos.table.eye import Entry, Look, Place
from tests.chaos.table.faults import Signalled
from tests.chaos.table.hits import Sent, Strike, hits
from tests.chaos.table.load import Job, late_text
from tests.chaos.table.record import Expected, Received, Record, Verdict, judge
from tests.chaos.table.rounds import Aim, num_coming
from tests.chaos.table.stillness import Stillness
from tests.chaos.table.table import Table

FAULT_AT = 100.0


def record(*tokens: tuple[int, int], text: str = "abc", resumes: int = 0, first_at: float = 99.0) -> Record:
    """Tokens (number, id), one per second."""
    finished = pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(resumes=resumes))
    received = [Received(number, token_id, first_at + i) for i, (number, token_id) in enumerate(tokens)]
    return Record("one", 90.0, received, text, finished)


EXPECTED = Expected.of(record((0, 7), (1, 8), (2, 9)))


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (record((0, 7), (1, 8), (2, 9)), Verdict(0, 0, 0, 0)),
        (record((0, 7), (2, 9)), Verdict(0, 1, 0, 0)),
        (record((0, 7), (1, 8), (1, 8), (2, 9)), Verdict(0, 0, 1, 0)),
        (record((0, 7), (1, 5), (2, 9)), Verdict(0, 0, 0, 1)),
        (record((0, 7), (1, 8), (2, 9), (3, 4)), Verdict(0, 0, 0, 1)),
        (record((0, 7), (1, 8), (2, 9), text="abd"), Verdict(0, 0, 0, 1)),
        (Record("failed", tokens=[Received(0, 7, 1.0)], error="gone"), Verdict(1, 0, 0, 0)),
    ],
)
def test_a_verdict_sees_every_difference(got: Record, verdict: Verdict) -> None:
    assert judge(got, EXPECTED) == verdict


def place(prefill: str, decode: str, pages: int = 1) -> Place:
    return Place(
        Entry("prefill-0", cluster_pb2.LedgerEntry(state=prefill)) if prefill else None,
        Entry("decode-0", cluster_pb2.LedgerEntry(state=decode, pages=pages)) if decode else None,
    )


@pytest.mark.parametrize(
    ("where", "state"),
    [
        (place("", ""), "queued"),
        (place("queued", "reserved"), "queued"),
        (place("computing", "landing"), "prefilling"),
        (place("pushing", "reserved"), None),
        (place("pushing", "landing"), "transferring"),
        (place("", "landing"), None),
        (place("", "running"), "decoding"),
    ],
)
def test_a_state_is_read_from_both_ledgers(where: Place, state: State | None) -> None:
    assert where.state() == state


@pytest.mark.parametrize(
    ("num_computing", "num_queued", "coming"), [(4, 5, 4), (3, 5, 0), (3, 3, 3), (2, 3, 0), (1, 0, 1), (0, 0, 0)]
)
def test_links_get_slow_for_a_pass_of_many_or_the_last_ones(num_computing: int, num_queued: int, coming: int) -> None:
    places = [place("computing", "reserved")] * num_computing + [place("queued", "reserved")] * num_queued
    jobs = [Job(pb.GenerateRequest(), EXPECTED, 40, is_talker=False) for _ in places]
    sent = [Sent(job, Record(str(number), sent_at=0.0)) for number, job in enumerate(jobs)]
    sent.append(Sent(Job(pb.GenerateRequest(), EXPECTED, 900, is_talker=False, is_long=True), Record("long", 0.0)))
    look = Look(FAULT_AT, {"long": place("computing", "landing"), **{str(n): each for n, each in enumerate(places)}})
    fault = Signalled(0, signal.SIGKILL, "prefill-0")
    assert num_coming(look, Aim(PREFILL_KILLED, ["transferring"]), fault, sent, 4) == coming


def states_hit(victim: Victim, worker: str, where: Place, of: Record) -> list[Cell]:
    sent = Sent(Job(pb.GenerateRequest(), EXPECTED, 40, is_talker=False), of)
    strike = Strike(victim, worker, frozenset(), Look(FAULT_AT - 0.1, {of.label: where}), FAULT_AT)
    return [hit.cell for hit in hits(strike, [sent])]


def test_a_hit_takes_both_the_ledger_and_the_record() -> None:
    decoding, tokens = place("", "running"), [(0, 7), (1, 8), (2, 9)]
    resumed, went_on = record(*tokens, resumes=1, first_at=98.5), record(*tokens, first_at=98.5)
    assert states_hit(DECODE_KILLED, "decode-0", decoding, resumed) == [Cell("decoding", DECODE_KILLED)]
    assert states_hit(DECODE_KILLED, "decode-0", decoding, went_on) == [], "nothing befell it"
    assert states_hit(DECODE_KILLED, "decode-1", decoding, resumed) == [], "it was on another worker"
    assert states_hit(PREFILL_KILLED, "prefill-0", decoding, went_on) == [Cell("decoding", PREFILL_KILLED)]
    over = record(*tokens, resumes=1, first_at=90.0)
    assert states_hit(DECODE_KILLED, "decode-0", decoding, over) == [], "it had all its tokens before"


def test_a_hit_while_transferring_takes_kv_that_is_missing() -> None:
    pushing, moving = place("pushing", "landing"), record((0, 7), (1, 8), first_at=99.5)
    assert moving.finished is not None
    moving.finished.timings.transfer_ms = 100
    assert states_hit(REDIS_GONE, "", pushing, moving) == [], "it was there 400 ms before the fault"
    moving.finished.timings.transfer_ms = 800
    assert states_hit(REDIS_GONE, "", pushing, moving) == [Cell("transferring", REDIS_GONE)]


def test_a_cell_without_the_resumes_that_it_takes_is_void() -> None:
    table = Table(select(["decoding/*"]), wanted=1)
    assert all(line.is_void for line in table.lines.values())
    with pytest.raises(ValueError, match="no cell matches"):
        select(["dancing/*"])


def test_a_cluster_is_used_until_one_worker_of_each_role_is_left() -> None:
    assert programme(Table(select(["draining/* stopped", "draining/* killed", "queued/GCS gone"]), wanted=1)) == [
        (DECODE_STOPPED, True),
        (PREFILL_STOPPED, True),
        (GCS_GONE, False),
    ]
    assert programme(Table(select(["draining/link cut", "draining/R* gone"]), wanted=1)) == [(LINK_CUT, True)]
    assert programme(Table(select(["*/GCS gone"]), wanted=1)) == [(GCS_GONE, True)]
    assert programme(Table(select(["draining/prefill killed", "queued/link cut"]), wanted=1)) == []


def test_a_stop_string_comes_for_the_first_time_near_the_end() -> None:
    text = "ab" * 20 + "xyz" + "cd" * 2
    (stop,) = late_text(text)
    assert text.find(stop) >= len(text) * 9 // 10
    assert late_text("a") == []


def test_only_a_standstill_at_the_time_of_the_fault_counts(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("100.0 0.5\n103.0 0.2\n")
    still = Stillness(notes)
    assert still.longest_s(100.4, 101.0) == 0.5
    assert still.longest_s(100.6, 102.9) == 0
    assert still.longest_s(99.0, 104.0) == 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_cells_on_a_real_cluster(tmp_path: Path) -> None:
    """The two that are hit at once, whatever the machine does beside: `make chaos` plays the whole table."""
    cells = [Cell("decoding", DECODE_KILLED), Cell("queued", LINK_CUT)]
    table = Table(cells, wanted=1)
    await Campaign(toy_plan(tmp_path, minutes=3, num_sets=2), table).run()
    print("\n" + table.markdown())
    assert table.is_clean, table.plain()
    assert table.needy(cells) == []
    assert not any(line.is_void for line in table.lines.values())
