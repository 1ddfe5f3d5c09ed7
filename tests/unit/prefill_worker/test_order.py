"""Whose tokens a pass computes: the shortest first, urgent ones before, and nobody overtaken for ever."""

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.pages import PagePool
from pdserve.due import PATIENCE
from pdserve.request import Sampling, WorkRequest
from prefill_worker.commands import Start
from prefill_worker.scheduler import PlannedChunk, PrefillScheduler, Prompt
from tests.toy import toy_engine, write_toy_model
from tests.unit.prefill_worker.stand import Stand, prompt

PAGE = 16


def own(call: int, length: int, *, num_emitted: int = 0) -> WorkRequest:
    """A prompt that shares nothing."""
    return WorkRequest("", tuple(range(10_000 * call, 10_000 * call + length)), length - num_emitted, Sampling(), 9)


class Stage:
    """A scheduler, and what its passes computed."""

    def __init__(self, budget: int = 64, num_pages: int = 1000, patience: int = PATIENCE) -> None:
        self.pool = PagePool(num_pages)
        self.queue = PrefillScheduler(self.pool, PAGE, budget, patience)
        self.prompts: list[Prompt] = []

    def add(self, length: int, *, priority: int = 0, num_emitted: int = 0) -> int:
        call = len(self.prompts)
        self.prompts.append(self.queue.add(call, own(call, length, num_emitted=num_emitted), priority))
        return call

    def compute(self) -> list[PlannedChunk]:
        """One pass; who is computed gives its pages back."""
        plan = self.queue.schedule()
        self.queue.advance(plan)
        for chunk in plan:
            if chunk.is_last:
                self.pool.give_back(chunk.prompt.page_ids, chunk.prompt.call)
        return plan

    def calls(self) -> list[int]:
        return [chunk.prompt.call for chunk in self.compute()]

    def finished(self) -> list[int]:
        """All that is left, in the order in which it is through."""
        order: list[int] = []
        while plan := self.compute():
            order += [chunk.prompt.call for chunk in plan if chunk.is_last]
        return order


def test_short_prompts_pass_long_ones_at_the_end_of_a_chunk() -> None:
    stage = Stage(budget=256)
    for _ in range(5):
        stage.add(2000)
    assert stage.calls() == [0]
    short = [stage.add(50) for _ in range(20)]
    assert [stage.calls() for _ in range(4)] == [short[first : first + 5] for first in (0, 5, 10, 15)]
    assert stage.finished() == [0, 1, 2, 3, 4]


def test_one_that_is_nearly_through_is_not_parked() -> None:
    stage = Stage()
    long = stage.add(640)
    for _ in range(9):
        stage.compute()
    shorter = stage.add(100)
    assert stage.finished() == [long, shorter]


def test_what_is_cached_is_no_work() -> None:
    stage = Stage()
    known = stage.add(640)
    stage.finished()
    other = stage.add(200)
    again = stage.queue.add(9, own(known, 640))
    assert (again.num_left, again.num_ready) == (16, 0)
    assert stage.finished() == [9, other]


def test_priority_then_what_resumes_then_the_shortest() -> None:
    stage = Stage()
    low, new, short, resumed, urgent = (
        stage.add(30, priority=5),
        stage.add(300),
        stage.add(200),
        stage.add(400, num_emitted=3),
        stage.add(500, priority=-1),
    )
    assert stage.finished() == [urgent, resumed, short, new, low]


def test_a_worker_is_told_what_is_urgent(tmp_path: Path) -> None:
    stand = Stand(toy_engine(write_toy_model(tmp_path)), chunk_tokens=64)
    for call, priority in enumerate((1, 0, -1)):
        stand.worker.submit(Start(call, prompt(60, kind=call), priority=priority))
    stand.run()
    assert list(stand.sampled) == [2, 1, 0]


def test_an_urgent_one_that_lacks_pages_gets_those_of_the_one_that_runs() -> None:
    stage = Stage(num_pages=40)
    running = stage.add(320, priority=1)
    stage.compute()
    urgent, small = stage.add(400), stage.add(20, priority=1)
    assert stage.finished() == [running, urgent, small]


def test_a_stream_of_short_ones_does_not_starve_a_long_one() -> None:
    stage = Stage()
    long, num_passes = stage.prompts[stage.add(640)], 0
    while not long.is_computed:
        stage.add(64)
        stage.compute()
        num_passes += 1
    assert num_passes == 10 + PATIENCE * 9 - 1, "overtaken by less than patience times what it is longer"


@st.composite
def _events(draw: st.DrawFn) -> list[tuple[int, int] | None]:
    """Arrivals of so many tokens and a priority, and passes between them."""
    arrival = st.tuples(st.integers(1, 150), st.sampled_from((0, 0, 0, 1)))
    return draw(st.lists(st.one_of(st.none(), arrival), max_size=40))


@given(_events(), st.integers(16, 90), st.integers(10, 40), st.integers(0, 4))
def test_nobody_is_overtaken_by_more_than_patience_times_its_length(
    events: list[tuple[int, int] | None], budget: int, num_pages: int, patience: int
) -> None:
    """Of its own priority, whatever comes when, with few pages as well as with many."""
    stage, overtaken = Stage(budget, num_pages, patience), Counter[int]()

    def compute() -> bool:
        waiting = [each for each in stage.prompts if not each.is_computed]
        plan = stage.compute()
        served = [chunk.prompt.call for chunk in plan]
        for each in waiting:
            before = served.index(each.call) if each.call in served else len(served)
            overtaken[each.call] += sum(
                chunk.end - chunk.start
                for chunk in plan[:before]
                if chunk.prompt.call > each.call and chunk.prompt.priority == each.priority
            )
        return bool(plan)

    for event in events:
        if event is None:
            compute()
        else:
            stage.add(event[0], priority=event[1])
    while compute():
        pass
    for each in stage.prompts:
        assert each.is_computed
        assert overtaken[each.call] <= patience * each.length
