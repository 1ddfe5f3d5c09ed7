"""What a decode worker holds already is pinned and not landed again: prompts, and its own answers."""

from collections.abc import Callable

import pytest

from decode_worker.commands import Decode, Release
from pdserve.errors import NoCapacity, ProtocolError
from pdserve.prefix import prompt_hashes
from pdserve.request import Sampling, Ticket, Token, WorkRequest
from tests.unit.decode_worker.stage import Prefill, Stage, failures, work

StageOf = Callable[[int], Stage]
ALL = range(3)


def next_turn(token_ids: list[int] | tuple[int, ...], max_tokens: int = 20) -> WorkRequest:
    """A prompt of just these tokens."""
    return WorkRequest("", tuple(token_ids), len(token_ids), Sampling(temperature=0.0), max_tokens)


def answer(stage: Stage, prefill: Prefill, request: WorkRequest, groups: tuple[range, ...] = (ALL,)) -> list[int]:
    """The completion: the prompt's KV from prefill, as far as decode lacks it, and the rest by decode."""
    ticket, first = stage.reserve(request), prefill.compute(request)
    pages = range(ticket.cached_pages, stage.layout.pages_for(len(request.token_ids)))
    payloads = [prefill.payload(ticket, pages, group) for group in groups]
    return [first.token_id, *stage.finish(ticket, *payloads, Decode(0, ticket, first))]


@pytest.mark.parametrize("groups", [(ALL,), (range(1), range(1, 3)), (range(1), range(1, 2), range(2, 3))])
def test_landed_by_layers_is_landed(stage_of: StageOf, prefill: Prefill, groups: tuple[range, ...]) -> None:
    request = work(40, 20)
    assert answer(stage_of(64), prefill, request, groups) == prefill.complete(request)


def test_the_next_turns_find_prompt_and_answer(stage_of: StageOf, prefill: Prefill) -> None:
    stage, token_ids = stage_of(64), list(work(40, 1).token_ids)
    for turn in range(4):
        request = next_turn(token_ids, 30)
        tokens = answer(stage, prefill, request)
        assert tokens == prefill.complete(request)
        # the KV of the last token was never computed
        num_known = (len(token_ids) + 29) // 16
        token_ids += [*tokens, *range(3, 14 + turn)]
        ticket = stage.reserve(next_turn(token_ids))
        assert ticket.cached_pages == num_known
        assert stage.worker.page_counts().in_use == num_known
        stage.step(Release(0, ticket))


def test_a_shared_prompt_is_held_by_both_and_written_by_none(stage_of: StageOf, prefill: Prefill) -> None:
    stage, request, branch = stage_of(64), work(40, 60), next_turn((*work(36, 1).token_ids, 9, 9, 9, 9))
    expected, other_expected = prefill.complete(branch), prefill.complete(request)
    ticket, first = stage.reserve(request), prefill.compute(request)
    stage.step(prefill.payload(ticket, range(3), ALL), Decode(0, ticket, first))
    shared = stage.entry(ticket).page_ids[:2]
    before = stage.engine.cache.pages[shared].clone()
    other, other_first = stage.reserve(branch), prefill.compute(branch)
    assert stage.entry(other).page_ids == shared
    assert stage.worker.page_counts().in_use == 3, "shared pages count once"
    commands = prefill.payload(other, range(2, 3), ALL), Decode(0, other, other_first)
    assert [other_first.token_id, *stage.finish(other, *commands)] == expected
    assert stage.worker.is_live(ticket.counter)
    stage.finish(ticket)
    emitted = [each for update in stage.history for each in update.emitted if each.counter == ticket.counter]
    assert [first.token_id, *(each.token.token_id for each in emitted)] == other_expected
    assert stage.engine.cache.pages[shared].equal(before)


def test_cached_pages_do_not_land_again(stage_of: StageOf) -> None:
    stage, request = stage_of(64), work(40, 10)
    stage.step(Release(0, stage.start(request)))
    ticket = stage.reserve(request)
    assert ticket.cached_pages == 2
    assert failures(stage.step(stage.landed(ticket, 0, 3, ALL))) == [(ticket.counter, ProtocolError)]
    ticket = stage.reserve(request)
    assert failures(stage.step(stage.landed(ticket, 2, 1, ALL))) == []
    assert stage.entry(ticket).landing.is_complete


def test_only_the_rest_is_promised(stage_of: StageOf) -> None:
    stage, request = stage_of(64), work(40, 10)
    stage.step(Release(0, stage.start(request)))
    assert stage.worker.page_counts().cached == 2
    ticket = stage.reserve(request)
    counts = stage.worker.page_counts()
    assert (counts.in_use, counts.cached, counts.promised) == (2, 0, 2)
    assert stage.entry(ticket).num_promised == 2


def test_the_page_of_the_last_prompt_token_is_always_sent(stage_of: StageOf) -> None:
    stage, request = stage_of(64), work(32, 40)
    stage.step(Release(0, stage.start(request)))
    assert stage.worker.page_counts().cached == 2, "both are whole"
    assert stage.reserve(request).cached_pages == 1
    assert stage.reserve(next_turn((*request.token_ids, 7))).cached_pages == 2


def test_a_page_is_found_when_its_last_layer_is_in(stage_of: StageOf) -> None:
    stage, request = stage_of(64), work(40, 10)
    ticket = stage.reserve(request)
    for landed, cached in (
        (stage.landed(ticket, 0, 1, ALL), 1),
        (stage.landed(ticket, 1, 2, range(2)), 1),
        (stage.landed(ticket, 1, 2, range(2, 3)), 2),
    ):
        stage.step(landed)
        probe = stage.reserve(request)
        assert probe.cached_pages == cached
        stage.step(Release(0, probe))


def test_a_page_is_found_when_its_last_token_is_computed(stage_of: StageOf) -> None:
    stage = stage_of(64)
    entry = stage.entry(stage.start(work(10, 60)))
    while entry.position < 66:
        hashes = prompt_hashes([*entry.token_ids, 0], 16)
        assert stage.worker._pool.find(hashes) == entry.page_ids[: entry.position // 16]
        stage.step()


def test_what_is_cached_makes_room_and_promises_hold(stage_of: StageOf) -> None:
    stage = stage_of(8)
    for start in (3, 100, 200):
        stage.finish(stage.start(work(33, 16, start=start)))
    assert stage.worker.page_counts().free == 0, "all that is not in use is cached"
    ticket = stage.start(work(65, 64, start=300), whole=True)
    stage.finish(ticket)
    assert stage.reserve(work(33, 16, start=3)).cached_pages == 0


def test_a_pinned_prefix_outlives_pressure(stage_of: StageOf, prefill: Prefill) -> None:
    stage, request = stage_of(8), work(33, 10)
    expected = answer(stage, prefill, request)
    pinned = stage.reserve(request)
    assert pinned.cached_pages == 2
    stage.start(work(17, 60, start=100), whole=True)
    assert isinstance(stage.outcome(work(1, 10, start=200), whole=True), NoCapacity)
    first = prefill.compute(request)
    commands = prefill.payload(pinned, range(2, 3), ALL), Decode(0, pinned, first)
    assert [first.token_id, *stage.finish(pinned, *commands)] == expected


def test_a_refused_request_pins_nothing(stage_of: StageOf) -> None:
    stage, request = stage_of(8), work(33, 10)
    stage.step(Release(0, stage.start(request)))
    stage.start(work(1, 64, start=100))
    before = stage.worker.page_counts()
    assert isinstance(stage.outcome(next_turn(request.token_ids, 60)), NoCapacity)
    assert stage.worker.page_counts() == before


def test_a_resumed_request_finds_its_own_tokens(stage_of: StageOf) -> None:
    stage, request = stage_of(64), work(16, 100)
    ticket = stage.start(request)
    for _ in range(40):
        stage.step()
    tokens = stage.entry(ticket).token_ids
    stage.step(Release(0, ticket))
    resumed = stage.reserve(request.resumed(tokens[16:]), whole=True)
    assert isinstance(resumed, Ticket)
    assert resumed.cached_pages == (len(tokens) - 1) // 16
    stage.step(stage.rest(resumed), Decode(0, resumed, Token(len(tokens) - 16, 9)))
    assert stage.step().emitted[0].token.number == len(tokens) - 16 + 2
