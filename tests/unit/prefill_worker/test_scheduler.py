"""First come, first served, under a token budget."""

from hypothesis import given
from hypothesis import strategies as st

from engine.pages import PagePool
from pdserve.request import Sampling, WorkRequest
from prefill_worker.scheduler import PrefillScheduler, Prompt


def prompt(call: int, length: int) -> Prompt:
    return Prompt(call, WorkRequest("", tuple(range(length)), length, Sampling(), max_tokens=4))


def test_a_step_fills_its_budget_in_order_of_arrival() -> None:
    scheduler = PrefillScheduler(PagePool(100), page_tokens=16, budget=64)
    first, second, third = prompt(1, 40), prompt(2, 40), prompt(3, 10)
    for each in (first, second, third):
        scheduler.add(each)
    plan = scheduler.schedule()
    assert [(chunk.prompt.call, chunk.start, chunk.num_tokens, chunk.is_last) for chunk in plan] == [
        (1, 0, 40, True),
        (2, 0, 24, False),
    ]
    assert scheduler.advance(plan) == [first]
    assert scheduler.queued_tokens == 26
    plan = scheduler.schedule()
    assert [(chunk.prompt.call, chunk.start, chunk.num_tokens) for chunk in plan] == [(2, 24, 16), (3, 0, 10)]
    assert scheduler.advance(plan) == [second, third]
    assert scheduler.schedule() == []


def test_without_pages_the_oldest_waits_and_nobody_overtakes() -> None:
    pool = PagePool(4)
    held = pool.take(2, "held")
    scheduler = PrefillScheduler(pool, page_tokens=16, budget=64)
    big, small = prompt(1, 64), prompt(2, 5)
    scheduler.add(big)
    scheduler.add(small)
    assert scheduler.schedule() == []
    pool.give_back(held, "held")
    assert [chunk.prompt for chunk in scheduler.schedule()] == [big]


def test_a_removed_prompt_is_not_computed() -> None:
    scheduler = PrefillScheduler(PagePool(100), page_tokens=16, budget=64)
    first, second = prompt(1, 100), prompt(2, 8)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.advance(scheduler.schedule())
    scheduler.remove(first)
    scheduler.remove(first)
    assert [chunk.prompt for chunk in scheduler.schedule()] == [second]


@given(lengths=st.lists(st.integers(1, 200), max_size=12), budget=st.integers(1, 97))
def test_every_token_is_computed_once_and_in_order(lengths: list[int], budget: int) -> None:
    scheduler = PrefillScheduler(PagePool(1000), page_tokens=16, budget=budget)
    done: list[int] = []
    for call, length in enumerate(lengths):
        scheduler.add(prompt(call, length))
    while plan := scheduler.schedule():
        assert sum(chunk.num_tokens for chunk in plan) <= budget
        done += [each.call for each in scheduler.advance(plan)]
    assert done == list(range(len(lengths)))
    assert scheduler.queued_tokens == 0
