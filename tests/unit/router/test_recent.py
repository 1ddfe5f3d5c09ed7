"""What a worker did lately, from the counters in its beats."""

from pdserve.v1.cluster_pb2 import Work
from router.recent import SPAN_S, Recent


def at(clock_s: float) -> Work:
    """Counters of a worker that was always busy."""
    steps = round(10 * clock_s)
    return Work(clock_s=clock_s, busy_s=clock_s / 2, passes=steps, tokens=3 * steps, flops=1e9 * steps, read_bytes=7)


def test_one_beat_tells_nothing() -> None:
    assert Recent(at(100)).work() == Work()


def test_a_few_beats_tell_of_the_time_since_the_first() -> None:
    recent = Recent(at(100))
    recent.add(at(101))
    assert recent.work() == Work(clock_s=1, busy_s=0.5, passes=10, tokens=30, flops=1e10)


def test_it_looks_back_a_few_seconds_and_no_more() -> None:
    recent = Recent(at(100))
    for beat in range(1, 200):
        recent.add(at(100 + 0.15 * beat))
    assert SPAN_S <= recent.work().clock_s < SPAN_S + 0.16
    recent.add(at(1000))  # nothing was heard in between
    recent.add(at(1000 + SPAN_S))
    assert recent.work().clock_s == SPAN_S


def test_a_clock_that_stands_still_does_not_fill_the_memory() -> None:
    recent = Recent(Work())
    for _ in range(1000):
        recent.add(Work())
    assert recent.work() == Work()
    assert len(recent._samples) < 100


def test_a_counter_that_goes_back_counts_as_nothing() -> None:
    recent = Recent(Work(clock_s=1, busy_s=2.0))
    recent.add(Work(clock_s=2, busy_s=1.999))
    assert recent.work() == Work(clock_s=1)
