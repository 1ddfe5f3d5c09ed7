"""When a request goes on after a fault, with what, and when it gives up."""

import asyncio

import pytest

from pdserve.errors import InvalidRequest, LegFailed, LinkDown, ProtocolError, Unavailable, WorkerLost, WorkerSilent
from pdserve.request import Sampling, Token, WorkRequest
from router.recovery import GOOD_TOKENS, MAX_STRIKES, RESUMABLE, Recovery

WORK = WorkRequest("label", (1, 2, 3), 3, Sampling(seed=7), max_tokens=100)


def take(recovery: Recovery, *numbers: int, finish: str = "") -> None:
    for number in numbers:
        recovery.take(Token(number, 50 + number, finish=finish))


async def test_the_next_attempt_has_the_emitted_tokens_behind_the_prompt() -> None:
    recovery = Recovery(WORK)
    assert recovery.work() is WORK
    take(recovery, 0, 1)
    await recovery.resume(LinkDown("cut"))
    work = recovery.work()
    assert work.token_ids == (1, 2, 3, 50, 51)
    assert (work.num_emitted, work.prompt_length, work.max_tokens, work.sampling.seed) == (2, 3, 100, 7)
    take(recovery, 2)
    await recovery.resume(LinkDown("cut"))
    assert recovery.work().token_ids == (1, 2, 3, 50, 51, 52)
    assert recovery.num_resumes == 2


async def test_a_client_that_resumes_starts_where_it_stopped() -> None:
    recovery = Recovery(WORK.resumed([50, 51]))
    take(recovery, 2)
    await recovery.resume(LinkDown("cut"))
    assert recovery.work().token_ids == (1, 2, 3, 50, 51, 52)


@pytest.mark.parametrize("number", [0, 2])
def test_a_token_out_of_turn_is_an_error(number: int) -> None:
    recovery = Recovery(WORK)
    take(recovery, 0)
    with pytest.raises(ProtocolError, match=f"token {number} came, expected 1"):
        take(recovery, number)


def test_nothing_comes_after_the_last_token() -> None:
    recovery = Recovery(WORK)
    take(recovery, 0, finish="stop_token")
    assert recovery.is_finished
    with pytest.raises(ProtocolError):
        take(recovery, 1)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [(LinkDown("cut"), MAX_STRIKES), (WorkerSilent("slow"), MAX_STRIKES), (WorkerLost("dead"), MAX_STRIKES // 2)],
)
async def test_it_gives_up_after_so_many_failures_in_a_row(
    error: LegFailed, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.recovery.BACK_OFF_S", (0.0,))
    recovery = Recovery(WORK)
    for number in range(attempts):
        take(recovery, number)
        await recovery.resume(error)
    with pytest.raises(Unavailable, match=f"after {attempts + 1} attempts, the last one ended with: {error}") as caught:
        await recovery.resume(error)
    assert not isinstance(caught.value, RESUMABLE)


async def test_an_attempt_that_gets_on_wipes_the_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.recovery.BACK_OFF_S", (0.0,))
    recovery, number = Recovery(WORK), 0
    for _ in range(3):
        for _ in range(MAX_STRIKES):
            await recovery.resume(LinkDown("cut"))
        take(recovery, *range(number, number + GOOD_TOKENS))
        number += GOOD_TOKENS


async def test_the_first_resume_is_immediate_and_later_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    recovery = Recovery(WORK)
    for _ in range(MAX_STRIKES):
        await recovery.resume(LinkDown("cut"))
    assert waits == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 0.8, 0.8]


def test_faults_of_the_request_itself_are_final() -> None:
    assert not issubclass(InvalidRequest, RESUMABLE)
    assert not issubclass(Unavailable, RESUMABLE)
