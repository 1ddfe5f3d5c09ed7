"""Passes under a token budget; what prompts share is computed once. Who goes first: test_order.py."""

from hypothesis import given
from hypothesis import strategies as st

from engine.pages import PagePool
from pdserve.request import Sampling, WorkRequest
from prefill_worker.scheduler import PlannedChunk, PrefillScheduler, Prompt

PAGE = 16
Chunks = list[tuple[int, int, int]]


def work(token_ids: range | tuple[int, ...], *, num_emitted: int = 0) -> WorkRequest:
    return WorkRequest("", tuple(token_ids), len(token_ids) - num_emitted, Sampling(), max_tokens=4)


def own(call: int, length: int) -> WorkRequest:
    """A prompt that shares nothing."""
    return work(range(1000 * call, 1000 * call + length))


def scheduler(budget: int = 64, num_pages: int = 1000) -> PrefillScheduler:
    """First come, first served."""
    return PrefillScheduler(PagePool(num_pages), PAGE, budget, patience=0)


def chunks(plan: list[PlannedChunk]) -> Chunks:
    return [(chunk.prompt.call, chunk.start, chunk.end) for chunk in plan]


def run_all(queue: PrefillScheduler) -> list[Chunks]:
    plans = []
    while plan := queue.schedule():
        plans.append(chunks(plan))
        queue.advance(plan)
    assert queue.queued_tokens == 0
    return plans


def test_a_pass_fills_its_budget_in_order_of_arrival() -> None:
    queue = scheduler()
    for call, length in enumerate((40, 40, 10)):
        queue.add(call, own(call, length))
    plan = queue.schedule()
    assert [chunk.is_last for chunk in plan] == [True, False]
    assert chunks(plan) == [(0, 0, 40), (1, 0, 16)], "a chunk that is not the last one ends where a page ends"
    queue.advance(plan)
    assert queue.queued_tokens == 34
    assert run_all(queue) == [[(1, 16, 40), (2, 0, 10)]]


def test_a_prompt_that_is_just_the_budget_is_one_chunk() -> None:
    queue = scheduler(budget=40)
    queue.add(0, own(0, 40))
    assert run_all(queue) == [[(0, 0, 40)]]


def test_resumed_prompts_go_before_new_ones_in_their_own_order() -> None:
    queue = scheduler(budget=16)
    queue.add(0, own(0, 16))
    for call in (1, 2):
        queue.add(call, work(range(call * 100, call * 100 + 16), num_emitted=3))
    assert run_all(queue) == [[(1, 0, 16)], [(2, 0, 16)], [(0, 0, 16)]]


def test_without_pages_the_oldest_waits_and_nobody_overtakes_but_who_has_pages_goes_on() -> None:
    pool = PagePool(6)
    queue = PrefillScheduler(pool, PAGE, budget=32, patience=0)
    first = queue.add(0, own(0, 80))
    queue.advance(queue.schedule())
    queue.add(1, work(range(100, 164), num_emitted=3))  # resumed: ahead, but there is no room for its 4 pages
    queue.add(2, own(2, 5))
    queue.advance(queue.schedule())
    assert first.num_ready == 64
    assert chunks(queue.schedule()) == [(0, 64, 80)], "there is room for the small one, and budget left"
    queue.remove(first)
    pool.give_back(first.page_ids, 0)
    assert chunks(queue.schedule()) == [(1, 0, 32)]


def test_a_removed_prompt_is_not_computed() -> None:
    queue = scheduler()
    first = queue.add(1, own(1, 100))
    queue.add(2, own(2, 8))
    queue.advance(queue.schedule())
    queue.remove(first)
    queue.remove(first)
    assert run_all(queue) == [[(2, 0, 8)]]


def test_what_is_shared_is_computed_once_though_all_arrive_together() -> None:
    queue = scheduler(budget=64, num_pages=100)
    prompts = [queue.add(call, work((*range(80), 500 + call, 7))) for call in range(5)]
    other = queue.add(9, own(9, 20))
    plans = run_all(queue)
    assert plans[0] == [(0, 0, 64)]
    assert plans[1] == [(0, 64, 82), (9, 0, 20)], "others behind go on"
    assert plans[2] == [(call, 80, 82) for call in range(1, 5)]
    assert [prompt.num_cached for prompt in (*prompts, other)] == [0, 80, 80, 80, 80, 0]
    assert len({tuple(prompt.page_ids[:5]) for prompt in prompts}) == 1


def test_a_prompt_takes_over_what_another_has_computed_meanwhile() -> None:
    pool = PagePool(100)
    queue = PrefillScheduler(pool, PAGE, budget=32, patience=0)
    first = queue.add(0, work((*range(96), 300)))
    queue.advance(queue.schedule())
    second = queue.add(1, work((*range(96), 301), num_emitted=1))  # goes first now
    queue.advance(queue.schedule())
    assert (second.num_cached, second.num_ready, first.num_ready) == (32, 64, 32)
    plans = run_all(queue)
    assert plans == [[(1, 64, 96)], [(1, 96, 97), (0, 96, 97)]]
    assert (first.num_cached, second.num_cached) == (64, 32)
    assert first.page_ids[:6] == second.page_ids[:6]
    assert pool.audit([(0, first.page_ids), (1, second.page_ids)], 0) == []


def test_the_last_token_is_computed_even_when_all_is_known() -> None:
    queue = scheduler()
    queue.add(0, work(range(64)))
    run_all(queue)
    twin, longer = queue.add(1, work(range(64))), queue.add(2, work(range(65)))
    assert run_all(queue) == [[(1, 48, 64), (2, 64, 65)]]
    assert (twin.num_cached, longer.num_cached) == (48, 64)


def test_a_prompt_that_waits_for_pages_of_others_holds_none() -> None:
    pool = PagePool(8)
    queue = PrefillScheduler(pool, PAGE, budget=64, patience=0)
    prompts: list[Prompt] = [queue.add(call, work((*range(64), 100 + call))) for call in range(4)]
    plan = queue.schedule()
    assert [len(prompt.page_ids) for prompt in prompts] == [5, 0, 0, 0]
    queue.advance(plan)
    assert chunks(queue.schedule()) == [(call, 64, 65) for call in range(4)], "8 pages are enough for all"


@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 120)), max_size=10),
    budget=st.integers(1, 97),
    num_pages=st.integers(8, 40),
    patience=st.integers(0, 3),
)
def test_every_token_is_computed_once_or_cached(
    prompts: list[tuple[int, int]], budget: int, num_pages: int, patience: int
) -> None:
    pool = PagePool(num_pages)
    queue = PrefillScheduler(pool, PAGE, budget, patience)
    waiting = [queue.add(call, work(range(1000 * kind, 1000 * kind + n))) for call, (kind, n) in enumerate(prompts)]
    computed = dict.fromkeys(range(len(prompts)), 0)
    while plan := queue.schedule():
        assert sum(chunk.end - chunk.start for chunk in plan) <= max(budget, PAGE)
        queue.advance(plan)
        for chunk in plan:
            computed[chunk.prompt.call] += chunk.end - chunk.start
            if chunk.is_last:
                pool.give_back(chunk.prompt.page_ids, chunk.prompt.call)
                chunk.prompt.page_ids = []
        assert pool.audit([(prompt.call, prompt.page_ids) for prompt in waiting], 0) == []
    assert all(computed[prompt.call] + prompt.num_cached == prompt.length == prompt.num_ready for prompt in waiting)
    assert queue.queued_tokens == 0
