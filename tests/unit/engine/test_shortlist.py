"""Sampling from a shortlist: the tokens are those of the sampler that looks at the whole row, every one."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.noise import hash52
from engine.sampler import Step, sample, sample_from_few
from engine.shortlist import MOST_K, Wish, _hash52, _signed, shortlists
from pdserve.request import Sampling, WorkRequest

VOCAB = 3000
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": MOST_K},
    {"top_k": MOST_K + 1},
    {"top_k": VOCAB + 5},
    {"top_p": 0.9},
    {"top_k": 40, "top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
]


def step(number: int, *, min_tokens: int = 0, top_logprobs: int = 0, **settings: Any) -> Step:
    sampling = Sampling(seed=number * 77 + 1, **settings)
    extra: dict[str, Any] = {"min_tokens": min_tokens, "stop_token_ids": (1, 2), "top_logprobs": top_logprobs}
    return Step(WorkRequest("label", (1, 2, 3), 3, sampling, 1000, **extra), number)


def logits(num_rows: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(4)) * spread


@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_all_settings_side_by_side(spread: float) -> None:
    rows, steps = logits(len(SETTINGS) * 20, spread), []
    for number in range(20):
        steps += [step(number, **settings) for settings in SETTINGS]
    assert sample_from_few(rows, steps) == sample(rows, steps)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_k": 5, "top_p": 0.7}, {"min_p": 0.3}]
)
def test_rounded_logits_tie_everywhere(settings: dict[str, Any]) -> None:
    rows, steps = logits(60, 1.5).round(), [step(number, **settings) for number in range(60)]
    assert sample_from_few(rows, steps) == sample(rows, steps)


def test_a_vocabulary_smaller_than_any_list() -> None:
    rows, steps = logits(8)[:, :3].contiguous(), [step(number, top_k=number % 5) for number in range(8)]
    assert sample_from_few(rows, steps) == sample(rows, steps)


def test_early_stop_tokens_log_probabilities_and_finish() -> None:
    rows = logits(4)
    rows[:, 1] = 50.0
    tokens = sample_from_few(
        rows, steps := [step(0, min_tokens=5), step(7, min_tokens=5), step(7), step(0, top_logprobs=3)]
    )
    assert tokens == sample(rows, steps)
    assert [token.finish for token in tokens] == ["", "stop_token", "stop_token", "stop_token"]
    assert len(tokens[3].top_logprobs) == 3


def test_which_rows_travel_whole() -> None:
    rows = logits(6)
    rows[1, 5] = math.nan
    rows[2, 5] = math.inf
    rows[3] = rows[3].round()
    wishes = [Wish(1, 1.0), Wish(1, 1.0), Wish(1), Wish(1, 1.0, top_k=100), Wish(1, 1.0, top_k=3), Wish(1)]
    found = shortlists(rows, wishes)
    assert [few is None for few in found] == [False, True, True, True, False, False]
    assert found[4] is not None
    assert sorted(found[4].ids) == sorted(rows[4].topk(3).indices.tolist())
    assert found[5] is not None
    assert found[5].ids.tolist() == [int(rows[5].argmax())]


def test_the_hash_is_the_samplers() -> None:
    ids, keys = np.arange(5000, dtype=np.uint64), [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    ours = _hash52(torch.arange(5000), torch.tensor([[_signed(key)] for key in keys]))
    assert np.array_equal(ours.numpy(), np.stack([hash52(ids, key) for key in keys]).astype(np.int64))
