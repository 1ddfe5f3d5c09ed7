"""Which few tokens of a row can be drawn at all: found where the logits are, so that only those travel to the CPU.

    logits on a GPU -> a handful of ids and their logits -> the sampler's own formula decides among them, on the CPU

The formula is the sampler's: the same integer hash, float64 noise. Logarithms of a GPU may differ from NumPy's in their
last bit, so this side only ranks, and hands over more ids than one. What a few ids do not tell is not done here: a
nucleus (top-p) of the whole vocabulary needs the sum over all of it, and where several logits tie for the last place of
a top-k, the rule for ties is the CPU's to apply.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.logprobs import Floats, Ids
from engine.noise import GOLDEN, MIX_1, MIX_2, UNIFORM_BITS

MOST_K = 256  # of a top-k
_NUM_NOISY = 4  # ids with the largest score + noise; a second one would do
_ROWS = 32  # at a time: float64 of a whole vocabulary for each


@dataclass(frozen=True)
class Wish:
    """What a row is drawn from."""

    key: int  # of its noise
    temperature: float = 0.0  # 0: the largest logit, no noise
    top_k: int = 0  # at most MOST_K; 0: all
    min_p: float = 0.0


@dataclass(frozen=True)
class Few:
    """Tokens among which the drawn one is, ascending."""

    ids: Ids
    logits: Floats  # theirs, fp32
    peak: float  # of the whole row


def shortlists(logits: Tensor, wishes: Sequence[Wish]) -> list[Few | None]:
    """For each row of logits, fp32 [R, vocab], on any device; None where the whole row has to be looked at."""
    found: list[Few | None] = []
    for start in range(0, len(wishes), _ROWS):
        found += _of_rows(logits[start : start + _ROWS], wishes[start : start + _ROWS])
    return found


def _of_rows(logits: Tensor, wishes: Sequence[Wish]) -> list[Few | None]:
    peaks, vocab_size = logits.amax(-1, keepdim=True), logits.shape[1]
    ids = torch.arange(vocab_size, device=logits.device)
    first = torch.where(logits == peaks, ids, vocab_size).amin(-1, keepdim=True)
    columns = [first.clamp(max=vocab_size - 1)]  # a row with NaN has none
    columns.append(_noisiest(logits, peaks, ids, wishes))
    columns.append(logits.topk(min(1 + max(wish.top_k for wish in wishes), vocab_size)).indices)
    found, num_noisy = torch.cat(columns, 1), columns[1].shape[1]
    values = torch.cat([peaks, logits.gather(1, found[:, 1:])], 1)
    rows = zip(wishes, found.cpu().numpy(), values.cpu().numpy(), strict=True)
    return [_few(wish, row_ids, row, num_noisy) for wish, row_ids, row in rows]


def _few(wish: Wish, ids: Ids, logits: Floats, num_noisy: int) -> Few | None:
    """Of one row: the id of the peak, then the noisiest, then the top ones in falling order."""
    peak = float(logits[0])
    if not math.isfinite(peak):
        return None
    if wish.temperature == 0:
        return Few(ids[:1], logits[:1], peak)
    if not wish.top_k:
        return _ascending(ids[1 : 1 + num_noisy], logits[1 : 1 + num_noisy], peak)
    top, their = ids[1 + num_noisy :], logits[1 + num_noisy :]
    if len(top) > wish.top_k and their[wish.top_k] == their[wish.top_k - 1]:
        return None
    return _ascending(top[: wish.top_k], their[: wish.top_k], peak)


def _ascending(ids: Ids, logits: Floats, peak: float) -> Few:
    order: NDArray[np.intp] = np.argsort(ids)
    return Few(ids[order], logits[order], peak)


def _noisiest(logits: Tensor, peaks: Tensor, ids: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """Ids with the largest logit / T + noise of each row, [R, _NUM_NOISY]."""
    if all(wish.temperature == 0 or wish.top_k for wish in wishes):
        return ids.new_empty(len(wishes), 0)
    temperatures = _column([wish.temperature or 1.0 for wish in wishes], logits.device)
    reach = _column([_reach(wish) for wish in wishes], logits.device)
    keys = torch.tensor([[_signed(wish.key)] for wish in wishes], dtype=torch.int64).to(logits.device)
    uniform: Tensor = (_hash52(ids, keys).double() + 0.5) / 2**UNIFORM_BITS
    scores = (logits.double() - peaks.double()) / temperatures - (-uniform.log()).log()
    scores = scores.masked_fill(logits < (peaks.double() + reach).float(), -math.inf)
    return scores.topk(min(_NUM_NOISY, logits.shape[1])).indices


def _reach(wish: Wish) -> float:
    """How far below the peak min-p lets a logit be."""
    return wish.temperature * math.log(wish.min_p) if wish.min_p > 0 else -math.inf


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device)[:, None]


def _hash52(ids: Tensor, keys: Tensor) -> Tensor:
    """`engine.noise.hash52` in int64, which wraps around like uint64: ids [vocab], keys [R, 1]."""
    words = (ids + 1) * _signed(GOLDEN) + keys
    words = (words ^ _shifted(words, 30)) * _signed(MIX_1)
    words = (words ^ _shifted(words, 27)) * _signed(MIX_2)
    return _shifted(words ^ _shifted(words, 31), 64 - UNIFORM_BITS)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, without the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
