"""Steering against transformers' logits processors, in the documented order, and as a function of the token list."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import generation as hf

from engine.noise import row_key
from engine.pilot import Pilot, pilot_of
from engine.sampler import Step, _noisy_argmax, sample
from pdserve.errors import InvalidRequest, NoTokenLeft
from pdserve.grammar import Grammars
from pdserve.request import Sampling, Token, WorkRequest, check
from pdserve.steering import Steering

VOCAB = 400
PROMPT = (5, 6, 7, 7, 380, 5, 11)
EMITTED = (5, 20, 20, 381, 20, 7, 399)

EACH: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.3, "presence_penalty": 0.4},
    {"logit_bias": ((3, 4.5), (20, -100.0), (399, 2.25))},
    {"allowed_token_ids": tuple(range(1, 400, 7))},
    {"banned_token_ids": tuple(range(0, 300))},
    {"allowed_token_ids": (8, 9, 10, 20, 30), "banned_token_ids": (9, 77)},
]
ALL: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "logit_bias": ((20, 3.0), (8, -1.0)),
    "allowed_token_ids": tuple(range(2, 390)),
    "banned_token_ids": (8, 9),
}


def request(steering: dict[str, Any], **changes: Any) -> WorkRequest:
    sampling = Sampling(**changes.pop("sampling", {}))
    return WorkRequest("r", PROMPT, len(PROMPT), sampling, 100, steering=Steering(**steering), **changes)


def pilot(work: WorkRequest) -> Pilot:
    made = pilot_of(work, VOCAB, Grammars())
    assert made is not None
    return made


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def reference(row: torch.Tensor, steering: dict[str, Any], emitted: tuple[int, ...] = EMITTED) -> torch.Tensor:
    """By transformers' processors where it has them, in the documented order; one row of scores."""
    given, scores = Steering(**steering), row[None].clone()
    tokens = torch.tensor([PROMPT + emitted])
    scores = hf.RepetitionPenaltyLogitsProcessor(given.repetition_penalty)(tokens, scores)
    counts = torch.bincount(torch.tensor(emitted, dtype=torch.int64), minlength=VOCAB)
    scores = scores - (given.frequency_penalty * counts + given.presence_penalty * (counts > 0))
    if given.logit_bias:
        bias = {(token_id,): value for token_id, value in given.logit_bias}
        scores = hf.SequenceBiasLogitsProcessor(bias)(tokens, scores)
    if given.allowed_token_ids:
        others = sorted(set(range(VOCAB)) - set(given.allowed_token_ids))
        scores = hf.SuppressTokensLogitsProcessor(others)(tokens, scores)
    if given.banned_token_ids:
        scores = hf.SuppressTokensLogitsProcessor(list(given.banned_token_ids))(tokens, scores)
    row_of_scores: torch.Tensor = scores[0]
    return row_of_scores


@pytest.mark.parametrize("steering", [*EACH, ALL], ids=str)
def test_logits_are_those_of_transformers(steering: dict[str, Any]) -> None:
    steered = pilot(request(steering).resumed(EMITTED))
    for row in rows(5):
        np.testing.assert_allclose(steered.steer(row.numpy()), reference(row, steering).numpy(), rtol=1e-5, atol=1e-6)
    fresh = pilot(request(steering))
    row = rows(1)[0]
    np.testing.assert_allclose(fresh.steer(row.numpy()), reference(row, steering, ()).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"temperature": 0.6, "top_k": 40, "top_p": 0.9}])
@pytest.mark.parametrize("steering", [ALL, ALL | {"allowed_token_ids": tuple(range(11, 390, 17))}], ids=["most", "few"])
def test_the_token_is_that_of_the_chain_in_the_documented_order(
    sampling: dict[str, Any], steering: dict[str, Any]
) -> None:
    for number, row in enumerate(rows(30)):
        work = request(steering, sampling={"seed": number, **sampling}, min_tokens=50, stop_token_ids=frozenset({20}))
        work = work.resumed(EMITTED)
        scores = reference(row, steering)[None]
        scores = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 50, 20)(torch.tensor([work.token_ids]), scores)
        if (temperature := work.sampling.temperature) > 0:
            scores = hf.TemperatureLogitsWarper(temperature)(torch.empty(0), scores)
            scores = hf.TopKLogitsWarper(work.sampling.top_k or VOCAB)(torch.empty(0), scores)
            scores = hf.TopPLogitsWarper(work.sampling.top_p)(torch.empty(0), scores)
            ids = np.flatnonzero(scores[0].numpy() > -np.inf)
            key = row_key(number, len(work.token_ids))
            expected = _noisy_argmax(ids, scores[0].double().numpy()[ids], key)[1]
        else:
            expected = int(scores.argmax())
        (token,) = sample(row[None], [Step(work, len(EMITTED), pilot(work))])
        assert token.token_id == expected


@pytest.mark.parametrize("steering", [*EACH, ALL], ids=str)
def test_taking_tokens_and_beginning_with_them_are_equal(steering: dict[str, Any]) -> None:
    work, row = request(steering), rows(1)[0].numpy()
    grown = pilot(work)
    for number, token_id in enumerate(EMITTED):
        resumed = pilot(work.resumed(EMITTED[:number]))
        assert grown.steer(row).tobytes() == resumed.steer(row).tobytes()
        assert grown.take(Token(number, token_id)) == Token(number, token_id)
    assert grown.steer(row).tobytes() == pilot(work.resumed(EMITTED)).steer(row).tobytes()


@pytest.mark.parametrize("steering", [*EACH, ALL], ids=str)
def test_the_models_logits_stay_as_they_are(steering: dict[str, Any]) -> None:
    row = rows(1)[0].numpy()
    before = row.copy()
    pilot(request(steering).resumed(EMITTED)).steer(row)
    assert (row == before).all()


def test_where_no_token_is_left_there_is_a_problem() -> None:
    stops = frozenset({3, 4})
    work = request({"allowed_token_ids": (3, 4)}, min_tokens=2, stop_token_ids=stops)
    with pytest.raises(NoTokenLeft, match="token 0 of"):
        pilot(work).check()
    pilot(work.resumed([9, 9])).check()
    with pytest.raises(NoTokenLeft):
        pilot(request({"allowed_token_ids": (3,), "banned_token_ids": (3,)})).check()


def test_who_asks_for_nothing_has_no_pilot() -> None:
    work = WorkRequest("r", PROMPT, len(PROMPT), Sampling(), 100)
    assert pilot_of(work, VOCAB, Grammars()) is None
    with pytest.raises(AssertionError, match="needs its pilot"):
        sample(rows(1), [Step(request(ALL), 0)])


@pytest.mark.parametrize(
    "steering",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": float("inf")},
        {"logit_bias": ((400, 1.0),)},
        {"logit_bias": ((3, float("nan")),)},
        {"allowed_token_ids": (400,)},
        {"banned_token_ids": (1, 4000)},
    ],
    ids=str,
)
def test_a_worker_refuses_what_it_cannot_apply(steering: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        check(request(steering), VOCAB, 512)
    check(request(ALL), VOCAB, 512)
