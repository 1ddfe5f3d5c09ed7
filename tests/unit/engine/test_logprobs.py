"""Log-probabilities against torch's log_softmax and transformers' own filters."""

from typing import Any

import pytest
import torch
from transformers import generation as hf

from engine.logprobs import scored
from engine.pilot import pilot_of
from engine.sampler import Step, sample
from pdserve.grammar import Grammars
from pdserve.request import Candidate, Sampling, Token, WorkRequest
from pdserve.steering import Steering

VOCAB = 700
PROMPT = (3, 4, 5)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def draw(row: torch.Tensor, number: int = 0, **changes: Any) -> Token:
    sampling = Sampling(**changes.pop("sampling", {"temperature": 0.0}))
    work = WorkRequest("r", PROMPT, len(PROMPT), sampling, 100, **changes)
    (token,) = sample(row[None], [Step(work, number, pilot_of(work, VOCAB, Grammars()))])
    return token


def check(token: Token, expected: torch.Tensor, count: int) -> None:
    order = expected.sort(descending=True, stable=True).indices[:count]
    order = order[expected[order].isfinite()]
    assert [candidate.token_id for candidate in token.top_logprobs] == order.tolist()
    assert [candidate.logprob for candidate in token.top_logprobs] == pytest.approx(expected[order].tolist(), abs=1e-4)
    assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-4)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_the_models_distribution_whatever_steers_and_filters(count: int) -> None:
    for number, row in enumerate(rows(10)):
        sampling = {"temperature": 0.7, "top_k": 50, "seed": number}
        steering = Steering(banned_token_ids=(int(row.argmax()),), repetition_penalty=1.5)
        token = draw(row, sampling=sampling, steering=steering, logprobs=True, top_logprobs=count)
        check(token, torch.log_softmax(row.double(), 0), count)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_the_distribution_that_the_token_was_drawn_from(sampling: dict[str, Any]) -> None:
    for number, row in enumerate(rows(10)):
        banned = tuple(row.topk(3).indices.tolist())
        steering = Steering(banned_token_ids=banned, repetition_penalty=1.5)
        drawn: dict[str, Any] = {"logprobs_as_drawn": True, "top_logprobs": 20, "steering": steering}
        token = draw(row, sampling={"seed": number, **sampling}, **drawn)
        scores = hf.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([PROMPT]), row[None].clone())
        scores = hf.SuppressTokensLogitsProcessor(list(banned))(torch.empty(0), scores)
        scores = hf.TemperatureLogitsWarper(float(sampling.get("temperature", 1.0)))(torch.empty(0), scores)
        scores = hf.TopKLogitsWarper(sampling.get("top_k", VOCAB))(torch.empty(0), scores)
        scores = hf.TopPLogitsWarper(sampling.get("top_p", 1.0))(torch.empty(0), scores)
        if "min_p" in sampling:
            scores = hf.MinPLogitsWarper(sampling["min_p"])(torch.empty(0), scores)
        check(token, torch.log_softmax(scores[0].double(), 0), 20)


def test_without_temperature_the_token_was_certain() -> None:
    token = draw(rows(1)[0], logprobs_as_drawn=True, top_logprobs=5)
    assert (token.logprob, token.top_logprobs) == (0.0, (Candidate(token.token_id, 0.0),))
    assert draw(rows(1)[0], logprobs_as_drawn=True, logprobs=True).top_logprobs == ()


def test_who_does_not_ask_gets_none() -> None:
    token = draw(rows(1)[0], logprobs_as_drawn=True)
    assert (token.logprob, token.top_logprobs) == (None, ())


def test_of_equal_ones_the_lowest_ids() -> None:
    row = torch.zeros(VOCAB).numpy()
    assert [candidate.token_id for candidate in scored(row, 600, 3).top] == [0, 1, 2]
