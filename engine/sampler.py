"""From logits to tokens.

Each row is handled by itself, and what comes out is a function of (seed, absolute position, logits) alone: no state, no
other rows. So a token is the same in whatever batch, on whatever worker and after whatever resume it is drawn.

    logits -> stop tokens banned below min_tokens -> temperature -> top-k -> top-p -> min-p
           -> argmax of logit / T + Gumbel noise (the lowest id wins a tie); temperature 0: argmax of the logits

The noise of a token is a hash of (seed, position, token id). Adding Gumbel noise to log-probabilities and taking the
largest draws from the distribution exactly (Gumbel 1954; Maddison et al. 2014, "A* sampling"), and unlike the inversion
of the cumulative sum it does not flip to another token when logits differ in their last bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.request import Candidate, Sampling, Token, WorkRequest, finish_after

# u is (k + 1/2) / 2^52 for a hashed k of 52 bits, exact in float64, so -log(-log(u)) lies between these two.
_UNIFORM_BITS = 52
_NOISE_MIN = -math.log(-math.log(0.5 / 2**_UNIFORM_BITS))  # -3.6
_NOISE_MAX = -math.log(-math.log1p(-0.5 / 2**_UNIFORM_BITS))  # 36.7
# A token this far below the best one, in units of T, cannot win: needs no noise, and weighs less than 1e-17 in top-p.
_REACH = _NOISE_MAX - _NOISE_MIN + 0.5
# Noise of tokens this close is computed in any case; of those beyond only where the hash says that it may be enough.
_NEAR = 8.0

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Step:
    """One row to sample: completion token `number` of a request."""

    request: WorkRequest
    number: int

    @property
    def position(self) -> int:
        """Absolute position of the token that is drawn."""
        return self.request.prompt_length + self.number


@torch.inference_mode()
def sample(logits: Tensor, steps: Sequence[Step]) -> list[Token]:
    """A token for each row of logits, fp32 [R, vocab]."""
    logits = logits.cpu()  # the same noise and order of sums wherever the model ran
    allowed = _ban_stop_tokens(logits, steps)
    peaks = allowed.max(dim=-1) if len(steps) else None
    tokens = []
    for index, step in enumerate(steps):
        assert peaks is not None
        token_id = int(peaks.indices[index])
        if step.request.sampling.temperature > 0:
            token_id = _draw(allowed[index], float(peaks.values[index]), step)
        top = _top_logprobs(logits[index], step.request.top_logprobs)
        tokens.append(Token(step.number, token_id, top, finish_after(step.request, step.number, token_id)))
    return tokens


def _ban_stop_tokens(logits: Tensor, steps: Sequence[Step]) -> Tensor:
    """Stop tokens cannot be drawn before min_tokens; the caller's logits stay as they are."""
    banned = [
        (row, token_id)
        for row, step in enumerate(steps)
        if step.number < step.request.min_tokens
        for token_id in step.request.stop_token_ids
        if token_id < logits.shape[1]
    ]
    if not banned:
        return logits
    rows, token_ids = torch.tensor(banned).unbind(dim=1)
    return logits.index_put((rows, token_ids), torch.tensor(-math.inf))


def _draw(row: Tensor, peak: float, step: Step) -> int:
    """The token with the largest logit / T + noise among those that the filters leave; `peak` is the row's maximum."""
    sampling = step.request.sampling
    ids = (row >= peak - _REACH * sampling.temperature).nonzero().flatten()
    scores = (row[ids].double() - peak) / sampling.temperature  # at most 0
    kept = _filter(scores, sampling)
    if kept is not None:
        ids, scores = ids[kept], scores[kept]
    return _noisy_argmax(ids, scores, _row_key(sampling.seed, step.position))


def _filter(scores: Tensor, sampling: Sampling) -> Tensor | None:
    """Places in `scores` [n] that top-k, top-p and min-p leave, ascending; None: all of them."""
    kept = None
    if 0 < sampling.top_k < len(scores):
        kept = _top_places(scores, sampling.top_k)
    if sampling.top_p < 1:
        nucleus = _nucleus(scores if kept is None else scores[kept], sampling.top_p)
        kept = nucleus if kept is None else kept[nucleus]
    if sampling.min_p > 0:
        left = scores if kept is None else scores[kept]
        likely = (left >= math.log(sampling.min_p)).nonzero().flatten()  # the best score is 0
        kept = likely if kept is None else kept[likely]
    return kept


def _top_places(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` highest, ascending; of equal ones the first."""
    last = scores.topk(count, sorted=False).values.min()
    above = (scores > last).nonzero().flatten()
    level = (scores == last).nonzero().flatten()[: count - len(above)]
    return torch.cat((above, level)).sort().values


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Places of the fewest tokens, from the most likely on, whose probabilities reach `top_p`; ascending."""
    weights = scores.exp()
    total = float(weights.sum())
    # All tokens below this together weigh less than (1 - top_p) * total, so none of them is needed: fewer to sort.
    places = (weights >= (1 - top_p) * total / len(scores)).nonzero().flatten()
    ordered, order = weights[places].sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    count = max(int((before < top_p * total).sum()), 1)
    return places[order[:count]].sort().values


def _noisy_argmax(ids: Tensor, scores: Tensor, key: int) -> int:
    """The id with the largest score + noise; `ids` ascend, the best score is 0.

    Few tokens lie near the best one. They give a value to beat, and from the others, often the whole vocabulary, the
    integer hash alone tells those few whose noise may be enough for that. The answer is that of the plain formula.
    """
    near = scores >= -_NEAR
    best, token_id = _best(ids[near], scores[near], key)
    if len(ids) == int(near.sum()):
        return token_id
    needed = max(math.floor(_uniform_of_noise(best + _NEAR) * 2**_UNIFORM_BITS) - 4, 0)  # 4: rounding of exp
    far = (_hash52(ids, key) >= needed) & ~near
    if not bool(far.any()):
        return token_id
    rival, rival_id = _best(ids[far], scores[far], key)
    return min((-best, token_id), (-rival, rival_id))[1]


def _best(ids: Tensor, scores: Tensor, key: int) -> tuple[float, int]:
    """The largest score + noise and its id, the lowest at a tie."""
    uniform = (_hash52(ids, key).double() + 0.5) / 2**_UNIFORM_BITS
    value, place = (scores - (-uniform.log()).log()).max(dim=0)
    return float(value), int(ids[place])


def _uniform_of_noise(noise: float) -> float:
    """The u in (0, 1) with -log(-log(u)) = noise."""
    return math.exp(-math.exp(-noise))


def _row_key(seed: int, position: int) -> int:
    """What a row's noise starts from; unrelated for neighbouring seeds and positions."""
    return _mix((_mix(seed & _MASK64) + position * _GOLDEN) & _MASK64)


def _mix(z: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _hash52(ids: Tensor, key: int) -> Tensor:
    """52 hashed bits for each id: output number id of a SplitMix64 that starts at `key`; int64 arithmetic wraps."""
    z = (ids + 1).mul_(_signed(_GOLDEN)).add_(_signed(key))
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return _shift_right(z.bitwise_xor_(_shift_right(z, 31)), 64 - _UNIFORM_BITS)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical, where torch's own shift repeats the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The same 64 bits as a signed number."""
    return word - 2**64 if word >= 2**63 else word


def _top_logprobs(row: Tensor, count: int) -> tuple[Candidate, ...]:
    """The `count` most likely tokens before any filter, by log-probability, then by id."""
    if not count:
        return ()
    ids = _top_places(row, min(count, len(row)))
    normalizer = row.double().logsumexp(0)  # in float64, so that the order of the sum does not show in fp32
    logprobs = (row[ids].double() - normalizer).float().tolist()
    found = [Candidate(token_id, logprob) for token_id, logprob in zip(ids.tolist(), logprobs, strict=True)]
    return tuple(sorted(found, key=lambda candidate: (-candidate.logprob, candidate.token_id)))
