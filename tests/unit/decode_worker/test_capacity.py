"""The prediction of how many requests fit, against a real worker that is filled to its first refusal."""

from pathlib import Path

import pytest

from decode_worker.capacity import Capacity, capacity
from pdserve.errors import InvalidRequest, NoCapacity, PdserveError
from pdserve.request import Ticket
from tests.toy import toy_engine
from tests.unit.decode_worker.stage import Stage, work

CASES = [(1, 2), (16, 2), (17, 64), (33, 65), (48, 66), (100, 128), (256, 128), (384, 128)]


def filled(stage: Stage, num_prompt: int, num_completion: int, *, whole: bool = False) -> tuple[int, PdserveError]:
    """Tickets until a refusal, and the refusal. Prompts differ from their first token on."""
    count = 0
    while True:
        outcome = stage.outcome(work(num_prompt, num_completion, start=3 + count), whole=whole)
        if not isinstance(outcome, Ticket):
            return count, outcome
        count += 1


@pytest.mark.parametrize("num_pages", [32, 100, 333])
@pytest.mark.parametrize(("num_prompt", "num_completion"), CASES)
def test_a_worker_admits_as_many_as_predicted(
    toy_folder: Path, num_pages: int, num_prompt: int, num_completion: int
) -> None:
    stage = Stage(toy_engine(toy_folder, num_pages=num_pages))
    predicted = capacity(stage.layout, num_pages, num_prompt, num_completion)
    count, refusal = filled(stage, num_prompt, num_completion)
    assert isinstance(refusal, NoCapacity)
    assert count == predicted.admitted


@pytest.mark.parametrize(("num_prompt", "num_completion"), [(1, 150), (33, 100), (16, 200)])
def test_as_many_as_predicted_reach_their_end_and_one_more_does_not(
    toy_folder: Path, num_prompt: int, num_completion: int
) -> None:
    engine = toy_engine(toy_folder, num_pages=48)
    count = capacity(engine.card.kv_layout, 48, num_prompt, num_completion).to_the_end
    for extra in (0, 1):
        stage = Stage(engine, max_batch=32)
        tickets = [stage.start(work(num_prompt, num_completion, start=3 + n)) for n in range(count + extra)]
        entries = [stage.entry(ticket) for ticket in tickets]
        while not stage.history[-1].failed and stage.worker.num_requests:
            least = min(entry.position for entry in entries)
            for entry in entries:
                del entry.token_ids[least + 1 :]  # all are at the same place, so that all are full at once
            stage.step()
        assert bool(stage.history[-1].failed) == bool(extra)


def test_what_exceeds_the_worker_never_fits(toy_folder: Path) -> None:
    stage = Stage(toy_engine(toy_folder, num_pages=10))
    assert capacity(stage.layout, 10, 150, 12) == Capacity(0, 0)
    assert isinstance(filled(stage, 150, 12)[1], InvalidRequest)
    assert capacity(stage.layout, 10, 150, 11) == Capacity(1, 1)
