"""Log-probabilities: of one token and of the likeliest ones, out of a row of logits or of what filters left of it."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runner import Forward
from pdserve.request import Candidate, Scored

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.intp]

# Tokens whose logit / T is this close to the best one's always get noise; others only where their hash promises enough.
NEAR = 5.0
_MOST_LOGITS = 2**22  # at a time, 16 MiB: of a long prompt all at once would be gigabytes


def scored(logits: Floats, token_id: int, count: int, ids: Ids | None = None) -> Scored:
    """`token_id` and the `count` likeliest, likeliest first and of equal ones the lowest id; `ids` names the logits."""
    peak = float(logits.max())
    normalizer = peak + math.log(exp(logits - peak).sum(dtype=np.float64))
    places = top_ids(logits, min(count, len(logits))) if count else np.empty(0, dtype=np.intp)
    places = places[logits[places] > -math.inf]
    chosen = token_id if ids is None else int(np.searchsorted(ids, token_id))
    values = _rounded(logits[[chosen, *places]], normalizer)
    names = places if ids is None else ids[places]
    top = [Candidate(int(name), value) for name, value in zip(names, values[1:], strict=True)]
    top.sort(key=lambda candidate: (-candidate.logprob, candidate.token_id))
    return Scored(Candidate(token_id, values[0]), tuple(top))


def score_prompt(forward: Forward, first_row: int, token_ids: tuple[int, ...], count: int) -> Iterator[Scored]:
    """Each of `token_ids` by the logits of the row before it, the first by those of row `first_row` of the pass."""
    step = max(1, _MOST_LOGITS // forward.vocab_size)
    for start in range(0, len(token_ids), step):
        targets = token_ids[start : start + step]
        logits = forward.logits_of(slice(first_row + start, first_row + start + len(targets))).cpu().numpy()
        yield from (scored(row, token_id, count) for row, token_id in zip(logits, targets, strict=True))


def top_ids(row: Floats, count: int) -> Ids:
    """The ids of the `count` highest logits, ascending; of equal ones the lowest."""
    pool = np.flatnonzero(row >= row.max() - NEAR)  # if these are enough, the others need no look
    if len(pool) < count:
        pool = np.arange(len(row))
    logits = row[pool]
    last = np.partition(logits, len(logits) - count)[len(logits) - count]
    above, level = pool[logits > last], pool[logits == last]
    return np.sort(np.concatenate((above, level[: count - len(above)])))


def exp(scores: Floats) -> Floats:
    """exp of scores up to 0, in fp32: many times quicker than float64, and exact to 1e-7 of a probability."""
    return np.exp(np.maximum(scores, -100.0).astype(np.float32))


def _rounded(logits: Floats, normalizer: float) -> list[float]:
    """Not more digits than there are."""
    values: list[float] = (logits.astype(np.float64) - normalizer).astype(np.float32).tolist()
    return values
