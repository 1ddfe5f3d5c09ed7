"""The sampler against the plain formula, against softmax, and against the promise that only its own row counts."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.noise import GOLDEN, UNIFORM_BITS, hash52, lucky_ids, mix, row_key
from engine.sampler import Step, _noisy_argmax, sample
from pdserve.request import Sampling, Token, WorkRequest

VOCAB = 3000


def step(number: int = 0, *, prompt_length: int = 5, **changes: Any) -> Step:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    sampling = Sampling(**{name: changes.pop(name) for name in names if name in changes})
    tokens = tuple(range(prompt_length))
    return Step(
        WorkRequest("label", tokens, prompt_length, sampling, changes.pop("max_tokens", 100), **changes), number
    )


def random_logits(num_rows: int, vocab_size: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7)) * spread


def draw(row: torch.Tensor, one: Step) -> int:
    return sample(row[None], [one])[0].token_id


def reference(row: torch.Tensor, one: Step) -> int:
    """Filters by a full sort, noise for every token: slow and plain."""
    sampling = one.request.sampling
    scores = row.double().numpy() / sampling.temperature
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[: sampling.top_k or None]
    weights = np.exp(scores[order] - scores[order[0]])
    probabilities = weights / weights.sum()
    count = int(np.searchsorted(probabilities.cumsum(), sampling.top_p)) + 1 if sampling.top_p < 1 else len(order)
    ids = np.array([i for i, w in zip(order[:count], weights, strict=False) if w >= sampling.min_p], dtype=np.intp)
    ids.sort()
    return _noisy_argmax(ids, scores[ids], row_key(sampling.seed, one.position))[1]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 2500},
        {"top_k": VOCAB + 5},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 2.5, "top_k": 900, "top_p": 0.99},
    ],
)
@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_equals_the_plain_formula(settings: dict[str, Any], spread: float) -> None:
    for index, row in enumerate(random_logits(40, spread=spread)):
        one = step(index, seed=index * 77, **settings)
        assert draw(row, one) == reference(row, one)


def test_the_noise_is_splitmix64_by_position_and_id() -> None:
    key = row_key(2**63 + 5, 1234)
    hashed = hash52(np.array([0, 1, 49151], dtype=np.uint64), key)
    expected = [mix((key + (token_id + 1) * GOLDEN) & (2**64 - 1)) >> 12 for token_id in (0, 1, 49151)]
    assert hashed.tolist() == expected
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 with seed 0, as published


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"temperature": 1.5}])
def test_frequencies_over_seeds_match_softmax(settings: dict[str, Any]) -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -0.5, 1.9])
    counts = np.bincount([draw(row, step(seed=seed, **settings)) for seed in range(8000)], minlength=8)
    probabilities = torch.softmax(row.double() / settings.get("temperature", 1.0), 0).numpy()
    assert chi_square(counts, probabilities) < 24.3  # 7 degrees of freedom: exceeded once in a thousand


def test_frequencies_over_positions_match_softmax() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = np.bincount([draw(row, step(number, seed=3, max_tokens=9999)) for number in range(8000)], minlength=4)
    assert chi_square(counts, torch.softmax(row.double(), 0).numpy()) < 16.3  # 3 degrees of freedom


def test_frequencies_of_a_long_tail_match_softmax() -> None:
    """One likely token and thousands far below it, which only the hash's pre-selection finds."""
    row = torch.full((VOCAB,), -7.5)
    row[5] = 0.0
    counts = np.zeros(4)
    for seed in range(6000):
        token_id = draw(row, step(seed=seed))
        counts[0 if token_id == 5 else 1 + token_id * 3 // VOCAB] += 1
    tail = (VOCAB - 1) * math.exp(-7.5)
    probabilities = np.array([1.0, tail / 3, tail / 3, tail / 3]) / (1 + tail)
    assert counts[1:].sum() > 1000
    assert chi_square(counts, probabilities) < 16.3


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random_logits(12)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 9},
        {"top_p": 0.8, "top_logprobs": 20},
        {"temperature": 0.0, "min_tokens": 50, "stop_token_ids": frozenset(range(500))},
        {"min_p": 0.1, "temperature": 1.3},
    ]
    steps = [step(index, seed=index, **kinds[index % len(kinds)]) for index in range(12)]
    together = sample(logits, steps)
    assert together == [sample(logits[index : index + 1], [steps[index]])[0] for index in range(12)]
    assert together[::-1] == sample(logits.flip(0), steps[::-1])


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    row = torch.zeros(VOCAB)
    row[[900, 17, 44]] = 3.0
    assert draw(row, step(temperature=0.0)) == 17
    assert draw(row, step(top_k=1)) == 17


def test_small_changes_of_logits_rarely_flip_a_token() -> None:
    row = random_logits(1)[0]
    moved = row + 1e-4 * torch.rand(VOCAB, generator=torch.Generator().manual_seed(1))
    steps = [step(seed=seed) for seed in range(500)]
    assert sum(draw(row, one) != draw(moved, one) for one in steps) <= 1


def test_seed_and_position_decide() -> None:
    row = random_logits(1, spread=0.5)[0]
    assert len({draw(row, step(seed=seed)) for seed in (0, 1, 2**63, 2**64 - 1)}) == 4
    assert draw(row, step(3, prompt_length=5)) == draw(row, step(0, prompt_length=8))  # a resume at the same position
    assert draw(row, step(3)) != draw(row, step(4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_banned_below_min_tokens(temperature: float) -> None:
    row = torch.zeros(50)
    row[9] = 50.0
    stops: dict[str, Any] = {"stop_token_ids": frozenset({9, 4000}), "min_tokens": 2, "temperature": temperature}
    assert draw(row, step(1, **stops)) != 9
    token = sample(row[None], [step(2, **stops)])[0]
    assert token == Token(2, 9, (), "stop_token")
    assert row[9] == 50.0
    assert sample(row[None], [step(1, max_tokens=2, **stops)])[0].finish == "length"


def test_everything_banned_still_gives_a_token() -> None:
    banned = frozenset(range(8))
    assert draw(torch.zeros(8), step(0, min_tokens=1, stop_token_ids=banned, top_p=0.5, top_k=3)) == 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    row = random_logits(1)[0]
    for settings in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        token_id = draw(row, step(temperature=temperature, **settings))
        assert temperature > 1 or token_id == int(row.argmax())


def test_top_logprobs_are_those_before_filters() -> None:
    row = random_logits(1)[0]
    row[[100, 2000]] = 20.0
    expected = torch.log_softmax(row.double(), 0)
    order = expected.sort(descending=True, stable=True).indices.tolist()
    for count in (1, 2, 20):
        top = sample(row[None], [step(top_logprobs=count, top_k=1, temperature=0.1)])[0].top_logprobs
        assert [candidate.token_id for candidate in top] == order[:count]
        assert [candidate.logprob for candidate in top] == pytest.approx(expected[[c.token_id for c in top]], abs=1e-5)


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("count", [1, 5000, 2**18 + 7])
def test_the_lucky_ids_are_those_of_the_hash(count: int) -> None:
    for key in (0, 1, row_key(7, 3), 2**64 - 1):
        hashed = hash52(np.arange(count, dtype=np.uint64), key)
        for needed in (0, 1, 2**51, 2**UNIFORM_BITS - 1, int(hashed.max()), int(hashed.max()) + 1, int(hashed[0])):
            assert np.array_equal(lucky_ids(count, key, needed), np.flatnonzero(hashed >= needed))
