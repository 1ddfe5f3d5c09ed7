"""Room by blocks of 64 tokens: who gets it, who gives way, who sits out."""

from collections.abc import Callable

import pytest

from decode_worker.commands import Decode, Release, StepUpdate
from pdserve.errors import NoCapacity, Preempted
from pdserve.request import Ticket, Token
from tests.unit.decode_worker.stage import Stage, failures, work

StageOf = Callable[[int], Stage]


def until_out_of_room(stage: Stage, ticket: Ticket) -> None:
    """Step until the next token of `ticket` needs a page that it was not promised."""
    entry = stage.entry(ticket)
    while entry.num_promised or entry.position < 16 * len(entry.page_ids):
        assert not stage.step().failed


def until_done(stage: Stage, ticket: Ticket) -> list[int]:
    """The numbers of all tokens that are still to come."""
    numbers = []
    while stage.worker.is_live(ticket.counter):
        emitted = stage.step().emitted
        numbers += [each.token.number for each in emitted if each.counter == ticket.counter]
    return numbers


def until_failure(stage: Stage, limit: int = 200) -> StepUpdate:
    """The first step in which a ticket fails."""
    return next(update for update in (stage.step() for _ in range(limit)) if update.failed)


def test_what_is_used_up_is_promised_again(stage_of: StageOf) -> None:
    stage = stage_of(12)
    ticket = stage.start(work(1, 192))
    entry = stage.entry(ticket)
    for num_pages in (4, 8):
        until_out_of_room(stage, ticket)
        assert (entry.position, len(entry.page_ids), entry.num_promised) == (16 * num_pages, num_pages, 0)
        stage.step()
        assert (len(entry.page_ids), entry.num_promised) == (num_pages + 1, 3)
    assert until_done(stage, ticket)[-1] == 191
    assert stage.worker.page_counts().in_use == 0


def test_no_more_is_promised_than_the_request_can_use(stage_of: StageOf) -> None:
    stage = stage_of(12)
    ticket = stage.start(work(1, 80))
    until_out_of_room(stage, ticket)
    stage.step()
    assert stage.worker.page_counts().promised == 0
    assert until_done(stage, ticket)[-1] == 79


def test_a_smaller_block_will_do_before_anybody_has_to_go(stage_of: StageOf) -> None:
    stage = stage_of(6)
    grower = stage.start(work(1, 96))
    other = stage.reserve(work(1, 10, start=100))
    until_out_of_room(stage, grower)
    assert not stage.step().failed
    assert len(stage.entry(grower).page_ids) == 5
    until_out_of_room(stage, grower)
    assert failures(stage.step()) == [(other.counter, Preempted)]


def test_the_youngest_goes_first_whatever_it_does_and_only_as_many_as_must(stage_of: StageOf) -> None:
    stage = stage_of(8)
    oldest = stage.start(work(1, 128))
    landing = stage.reserve(work(17, 4, start=100))
    running = stage.reserve(work(1, 2, start=200))
    stage.step(stage.landed(landing, 0, 1, range(3)))
    first = until_failure(stage)
    assert failures(first) == [(running.counter, Preempted)]
    assert str(first.failed[0].error) == (
        f"ticket {running.counter} gives up its KV pages (0 held and 1 promised): "
        "an older request needs a page, 0 of 8 available"
    )
    assert not stage.worker.is_live(running.counter)
    assert failures(until_failure(stage)) == [(landing.counter, Preempted)]
    assert until_done(stage, oldest)[-1] == 127


def test_the_victim_is_in_no_batch_any_more(stage_of: StageOf) -> None:
    stage = stage_of(6)
    oldest = stage.start(work(1, 96))
    youngest = stage.start(work(1, 16, start=100))
    while stage.entry(oldest).position < 79:
        entry = stage.entry(youngest)
        del entry.token_ids[3:]  # keep it running, on its one page, for as long as the test likes
        stage.step()
    update = until_failure(stage)
    assert failures(update) == [(youngest.counter, Preempted)]
    assert [emitted.counter for emitted in update.emitted] == [oldest.counter]


def test_what_was_promised_whole_never_goes(stage_of: StageOf) -> None:
    stage = stage_of(8)
    oldest = stage.start(work(1, 96))
    other = stage.reserve(work(1, 20, start=100))
    whole = stage.reserve(work(1, 20, start=200), whole=True)
    assert failures(until_failure(stage)) == [(other.counter, Preempted)]
    assert stage.worker.is_live(whole.counter)
    assert until_done(stage, oldest)[-1] == 95


def test_the_youngest_may_be_the_one_that_grows_and_the_oldest_never_goes(stage_of: StageOf) -> None:
    stage = stage_of(9)
    oldest = stage.reserve(work(1, 48))
    grower = stage.start(work(1, 128, start=100))
    whole = stage.reserve(work(1, 32, start=200), whole=True)
    update = until_failure(stage)
    assert failures(update) == [(grower.counter, Preempted)]
    assert not update.emitted
    assert stage.worker.is_live(oldest.counter)
    assert stage.worker.is_live(whole.counter)
    assert stage.worker.page_counts().in_use == 0


def test_beside_an_oldest_that_is_whole_the_grower_goes_itself(stage_of: StageOf) -> None:
    stage = stage_of(9)
    stage.reserve(work(1, 64), whole=True)
    grower = stage.start(work(1, 128, start=100))
    assert failures(until_failure(stage)) == [(grower.counter, Preempted)]


def sitting_out(stage: Stage, max_tokens: int) -> tuple[Ticket, Ticket]:
    """The oldest ticket needs a page, and the only other one was promised all that it needs and is still landing."""
    oldest = stage.start(work(1, max_tokens))
    whole = stage.reserve(work(1, 64, start=100), whole=True)
    until_out_of_room(stage, oldest)
    return oldest, whole


@pytest.mark.parametrize("max_batch", [1, 8])
def test_the_oldest_sits_out_until_pages_come_back_and_loses_no_token(stage_of: StageOf, max_batch: int) -> None:
    """Also where one row is all there is: who sits out leaves it to those whose pages it waits for."""
    stage = stage_of(8)
    stage.worker._max_batch = max_batch
    oldest, whole = sitting_out(stage, 120)
    position = stage.entry(oldest).position
    for _ in range(3):
        assert not stage.step()
        assert stage.worker.is_idle, "nothing to do before the next command"
    stage.step(stage.rest(whole), Decode(0, whole, Token(0, 9)))
    while stage.worker.is_live(whole.counter):
        assert stage.entry(oldest).position == position
        assert not stage.worker.is_idle
        assert not stage.step().failed
    assert until_done(stage, oldest) == list(range(position, 120))


def test_while_the_oldest_sits_out_nobody_else_takes_its_pages(stage_of: StageOf) -> None:
    stage = stage_of(8)
    oldest, whole = sitting_out(stage, 100)
    stage.step()
    stage.worker.submit(Release(0, whole))
    refused = stage.outcome(work(1, 16, start=200), whole=True)
    assert isinstance(refused, NoCapacity)
    assert "the oldest request waits for a page, 4 of 8 available" in str(refused)
    assert stage.entry(oldest).position == 65, "it goes on in the same step"
    stage.reserve(work(1, 16, start=200), whole=True)


def test_a_resumed_request_is_never_asked_again(stage_of: StageOf) -> None:
    """Two that both want the whole pool: each gives way at most once, and both end."""
    stage = stage_of(10)
    requests = {}
    for start in (3, 100):
        request = work(1, 150, start=start)
        requests[stage.start(request).counter] = request
    preempted = until_failure(stage).failed
    resumed = requests[preempted[0].counter].resumed([7, 8])
    while not isinstance(ticket := stage.outcome(resumed, whole=True), Ticket):
        pass
    assert stage.finish(ticket, stage.rest(ticket), Decode(0, ticket, Token(2, 9)))
    assert [failed for update in stage.history for failed in update.failed] == preempted
    assert sum(bool(emitted.token.finish) for update in stage.history for emitted in update.emitted) == 2
    assert stage.worker.num_requests == 0


@pytest.mark.parametrize("max_batch", [1, 2])
def test_no_more_than_a_batch_runs_at_once(stage_of: StageOf, max_batch: int) -> None:
    stage = Stage(stage_of(12).engine, max_batch)
    tickets = [stage.start(work(1, 10, start=3 + 100 * n)) for n in range(3)]
    ran = [emitted.counter for emitted in stage.step().emitted]
    assert ran == [ticket.counter for ticket in tickets[:max_batch]]
