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
from torch import Tensor

from engine.logprobs import NEAR, Floats, Ids, exp, scored, top_ids
from engine.noise import UNIFORM_BITS, hash52, lucky_ids, row_key
from engine.pilot import Pilot
from engine.shortlist import MOST_K, Few, Wish, shortlists
from pdserve.request import Candidate, Sampling, Scored, Token, WorkRequest, finish_after


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
    """A token for each row of logits, fp32 [R, vocab]. It is decided on the CPU: the same wherever the model ran."""
    if logits.device.type != "cpu":
        return sample_from_few(logits.detach(), steps)
    rows: Floats = logits.detach().numpy()
    return [_sample_row(row, step) for row, step in zip(rows, steps, strict=True)]


def sample_from_few(logits: Tensor, steps: Sequence[Step]) -> list[Token]:
    """The same as `sample`, for logits on a device: few rows travel to the CPU whole."""
    asked = [index for index, step in enumerate(steps) if _needs_few(step, logits.shape[1])]
    rows = logits if len(asked) == len(steps) else logits[asked]
    lists = dict(zip(asked, shortlists(rows, [_wish(steps[index], logits.shape[1]) for index in asked]), strict=True))
    whole = [index for index in range(len(steps)) if lists.get(index) is None]
    wholes = dict(zip(whole, logits[whole].cpu().numpy(), strict=True)) if whole else {}
    return [
        _sample_row(wholes[index], step) if (few := lists.get(index)) is None else _sample_few(few, step)
        for index, step in enumerate(steps)
    ]


def _needs_few(step: Step, vocab_size: int) -> bool:
    """Whether a shortlist is enough; an unsteered request without top-p alone, log-probabilities, early stop tokens."""
    request, sampling = step.request, step.request.sampling
    is_plain = step.pilot is None and not request.wants_logprobs
    may_end = step.number >= request.min_tokens or not request.stop_token_ids
    has_list = 0 < sampling.top_k <= min(MOST_K, vocab_size - 1)
    is_open = sampling.top_p >= 1 and not 0 < sampling.top_k < vocab_size
    return is_plain and may_end and (sampling.temperature == 0 or has_list or is_open)


def _wish(step: Step, vocab_size: int) -> Wish:
    sampling = step.request.sampling
    top_k = sampling.top_k if sampling.top_k < vocab_size and sampling.temperature > 0 else 0
    return Wish(row_key(sampling.seed, step.position), sampling.temperature, top_k, sampling.min_p)


def _sample_few(few: Few, step: Step) -> Token:
    sampling, token_id = step.request.sampling, int(few.ids[0])
    if sampling.temperature > 0:
        places = _filtered(few.logits, few.peak, sampling)
        ids, logits = (few.ids, few.logits) if places is None else (few.ids[places], few.logits[places])
        token_id = _noisy_argmax(ids, _scores(logits, few.peak, sampling), row_key(sampling.seed, step.position))[1]
    return Token(step.number, token_id, finish=finish_after(step.request, step.number, token_id))


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
    key = row_key(sampling.seed, step.position)
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
    needed = int(uniform * 2**UNIFORM_BITS * (1 - 1e-12))  # a little less, for the rounding of exp
    lucky = lucky_ids(len(row), key, needed)
    if not len(lucky):
        return token_id
    rival, rival_id = _noisy_argmax(lucky, _scores(row[lucky], peak, sampling), key)
    return min((-best, token_id), (-rival, rival_id))[1]


def _noisy_argmax(ids: Ids, scores: Floats, key: int) -> tuple[float, int]:
    """The largest score + noise, and its id; the lowest id wins a tie, as `ids` ascend."""
    uniform = (hash52(ids.astype(np.uint64), key) + 0.5) / 2**UNIFORM_BITS
    values = scores - np.log(-np.log(uniform))
    place = values.argmax()
    return float(values[place]), int(ids[place])
