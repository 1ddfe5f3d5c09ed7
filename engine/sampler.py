"""From logits to tokens.

Each row is handled by itself, and what comes out is a function of (seed, absolute position, tokens so far, logits)
alone. So a token is the same in whatever batch, on whatever worker and after whatever resume it is drawn.

    logits -> penalties, bias, tokens that may not be chosen (engine/pilot.py) -> stop tokens banned below min_tokens
           -> temperature -> top-k -> top-p -> min-p
           -> argmax of logit / T + Gumbel noise (the lowest id wins a tie); temperature 0: argmax of the logits

The noise of a token is a hash of (seed, position, token id). Adding Gumbel noise to log-probabilities and taking the
largest draws from the distribution exactly (Gumbel 1954; Maddison et al. 2014, "A* sampling"), and unlike the inversion
of the cumulative sum it does not flip to another token when logits differ in their last bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.logprobs import NEAR, Floats, Ids, exp, scored, top_ids
from engine.pilot import Pilot
from pdserve.request import Candidate, Sampling, Scored, Token, WorkRequest, finish_after

Words = NDArray[np.uint64]

# u is (k + 1/2) / 2^52 for a hashed k of 52 bits: exact in float64, and never 0 or 1.
_UNIFORM_BITS = 52

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Step:
    """One row to sample: completion token `number` of a request."""

    request: WorkRequest
    number: int
    pilot: Pilot | None = None  # of the tokens before `number`; there is one where the request is steered

    @property
    def position(self) -> int:
        """Absolute position of the token that is drawn."""
        return self.request.prompt_length + self.number


def sample(logits: Tensor, steps: Sequence[Step]) -> list[Token]:
    """A token for each row of logits, fp32 [R, vocab]. Runs on the CPU: the same bits wherever the model ran."""
    rows: Floats = logits.detach().cpu().numpy()
    return [_sample_row(row, step) for row, step in zip(rows, steps, strict=True)]


def _sample_row(row: Floats, step: Step) -> Token:
    request, sampling = step.request, step.request.sampling
    allowed = _allowed(row, step)
    token_id, ids = int(allowed.argmax()), None  # the first, which is the lowest, of equal ones
    peak = float(allowed[token_id])
    if sampling.temperature > 0 and peak > -math.inf:
        ids = _filtered(allowed, peak, sampling)
        token_id = _draw(allowed, ids, peak, step)
    finish = finish_after(request, step.number, token_id)
    if not request.wants_logprobs:
        return Token(step.number, token_id, finish=finish)
    if request.logprobs_as_drawn:
        score = _as_drawn(allowed, ids, request, token_id)
    else:
        score = scored(row, token_id, request.top_logprobs)
    return Token(step.number, token_id, score.top, finish, score.chosen.logprob)


def _as_drawn(row: Floats, ids: Ids | None, request: WorkRequest, token_id: int) -> Scored:
    """In the distribution that the token was drawn from; without temperature it was certain."""
    sampling, count = request.sampling, request.top_logprobs
    if sampling.temperature == 0:
        certain = Candidate(token_id, 0.0)
        return Scored(certain, (certain,)[:count])
    logits = row if ids is None else row[ids]
    return scored(_scores(logits, float(logits.max()), sampling), token_id, count, ids)


def _allowed(row: Floats, step: Step) -> Floats:
    """The row as steered, without stop tokens before min_tokens; the caller's logits stay as they are."""
    request, pilot = step.request, step.pilot
    assert (request.steering is None) == (pilot is None), f"{request.label}: a steered request needs its pilot"
    allowed = row if pilot is None else pilot.steer(row)
    if step.number < request.min_tokens and request.stop_token_ids:
        allowed = row.copy() if allowed is row else allowed
        allowed[[token_id for token_id in request.stop_token_ids if token_id < len(row)]] = -math.inf
    return allowed


def _draw(row: Floats, ids: Ids | None, peak: float, step: Step) -> int:
    """The token with the largest logit / T + noise among `ids`, None for all; `peak` is the row's maximum."""
    sampling = step.request.sampling
    key = _row_key(sampling.seed, step.position)
    if ids is None and step.pilot is not None:
        ids = _few(row)
    if ids is None:
        return _noisy_argmax_of_all(row, peak, sampling, key)
    return _noisy_argmax(ids, _scores(row[ids], peak, sampling), key)[1]


def _few(row: Floats) -> Ids | None:
    """The tokens that may be chosen, ascending, where these are so few that all the others need no look."""
    ids = np.flatnonzero(row > -math.inf)
    return ids if len(ids) < len(row) // 8 else None


def _scores(logits: Floats, peak: float, sampling: Sampling) -> Floats:
    """logit / T in float64, shifted so that the best is 0."""
    return (logits.astype(np.float64) - peak) / sampling.temperature


def _filtered(row: Floats, peak: float, sampling: Sampling) -> Ids | None:
    """The ids that top-k, top-p and min-p leave, ascending; None where no filter is on."""
    ids = None
    if 0 < sampling.top_k < len(row):
        ids = top_ids(row, sampling.top_k)
    if sampling.top_p < 1:
        nucleus = _nucleus(_scores(row if ids is None else row[ids], peak, sampling), sampling.top_p)
        ids = nucleus if ids is None else ids[nucleus]
    if sampling.min_p > 0:  # of the best one's probability, so the others need not be known
        lowest = peak + sampling.temperature * math.log(sampling.min_p)
        ids = np.flatnonzero(row >= lowest) if ids is None else ids[row[ids] >= lowest]
    return ids


def _nucleus(scores: Floats, top_p: float) -> Ids:
    """Places of the fewest tokens, from the most likely on, whose probabilities reach `top_p`; ascending."""
    weights = exp(scores)
    total = weights.sum(dtype=np.float64)
    # All tokens below this together weigh less than (1 - top_p) * total, so none of them is needed: fewer to sort.
    places = np.flatnonzero(weights >= (1 - top_p) * total / len(scores))
    order = np.argsort(-weights[places], kind="stable")
    reached = weights[places[order]].cumsum(dtype=np.float64)
    count = int((reached < top_p * total).sum()) + 1  # beyond the end where rounding lets the sum fall short
    return np.sort(places[order[:count]])


def _noisy_argmax_of_all(row: Floats, peak: float, sampling: Sampling, key: int) -> int:
    """The id with the largest logit / T + noise out of the whole vocabulary: what the plain formula gives, sooner.

    Few tokens lie near the best one: they give a value to beat. All others need noise of at least that value plus their
    distance, and the integer hash alone tells which few have so much.
    """
    near = np.flatnonzero(row >= peak - NEAR * sampling.temperature)
    best, token_id = _noisy_argmax(near, _scores(row[near], peak, sampling), key)
    uniform = math.exp(-math.exp(-(best + NEAR)))  # where the noise is best + NEAR
    needed = np.uint64(uniform * 2**_UNIFORM_BITS * (1 - 1e-12))  # a little less, for the rounding of exp
    lucky = np.flatnonzero(_hash52(np.arange(len(row), dtype=np.uint64), key) >= needed)
    if not len(lucky):
        return token_id
    rival, rival_id = _noisy_argmax(lucky, _scores(row[lucky], peak, sampling), key)
    return min((-best, token_id), (-rival, rival_id))[1]


def _noisy_argmax(ids: Ids, scores: Floats, key: int) -> tuple[float, int]:
    """The largest score + noise, and its id; the lowest id wins a tie, as `ids` ascend."""
    uniform = (_hash52(ids.astype(np.uint64), key) + 0.5) / 2**_UNIFORM_BITS
    values = scores - np.log(-np.log(uniform))
    place = values.argmax()
    return float(values[place]), int(ids[place])


def _row_key(seed: int, position: int) -> int:
    """What a row's noise starts from; unrelated for neighbouring seeds and positions."""
    return _mix((_mix(seed & _MASK64) + position * _GOLDEN) & _MASK64)


def _mix(word: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014) on one 64-bit word."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK64
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK64
    return word ^ (word >> 31)


def _hash52(ids: Words, key: int) -> Words:
    """52 hashed bits for each id: output number id + 1 of the SplitMix64 that starts at `key`. uint64 wraps around."""
    words = ids + np.uint64(1)
    words *= np.uint64(_GOLDEN)
    words += np.uint64(key)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MIX_2)
    words ^= words >> np.uint64(31)
    words >>= np.uint64(64 - _UNIFORM_BITS)
    return words
