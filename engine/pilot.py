"""A request's steering at work: from the tokens so far to what happens to the logits of the next one.

    logits -> repetition penalty -> frequency and presence penalties -> bias -> tokens that may not be chosen: -inf

Those are what allowed_token_ids lacks, banned_token_ids has, the grammar forbids, and stop tokens below min_tokens.

A pilot lives as long as its request is on a worker: it begins with the request's tokens and takes every further one, so
that a step costs the same at any length. What it knows is a function of the token list alone: one that takes tokens and
one that begins with them are equal.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import AlreadyComplete, InvalidRequest, NoTokenLeft, PdserveError
from pdserve.grammar import Grammars, Matcher
from pdserve.request import Token, WorkRequest
from pdserve.steering import Steering

Floats = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]  # [vocab]: what may be chosen


class Pilot:
    """Steers one request."""

    def __init__(self, request: WorkRequest, steering: Steering, vocab_size: int, matcher: Matcher | None) -> None:
        """`matcher` is at the beginning of the request's grammar. Raises InvalidRequest, AlreadyComplete."""
        self.problem: PdserveError | None = None  # why the request cannot go on
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._request = request
        self._next_number = request.num_emitted
        self._repetition = _Repetition(steering.repetition_penalty, vocab_size)
        self._counts = _Counts(steering, vocab_size)
        self._bias_ids = np.array([token_id for token_id, _ in steering.logit_bias], dtype=np.intp)
        self._biases = np.array([bias for _, bias in steering.logit_bias], dtype=np.float32)
        self._listed = _listed(steering, vocab_size)
        self._stop_ids = [token_id for token_id in request.stop_token_ids if token_id < vocab_size]
        self._repetition.take(request.token_ids)
        self._counts.take(request.token_ids[request.prompt_length :])
        self._replay(request.token_ids[request.prompt_length :])
        self._look_ahead()

    def take(self, token: Token) -> Token:
        """Note a token of the completion; the one returned may be the last, because the grammar is complete."""
        self._next_number = token.number + 1
        self._repetition.take([token.token_id])
        self._counts.take([token.token_id])
        if token.finish:
            return token
        if self._matcher is not None:
            self._matcher.take([token.token_id])
            if self._matcher.is_complete:
                return replace(token, finish="grammar")
        self._look_ahead()
        return token

    def check(self) -> None:
        """Raise `problem`, if there is one."""
        if self.problem is not None:
            raise self.problem

    def steer(self, row: Floats) -> Floats:
        """The next token's logits, fp32 [vocab], as steered: another array."""
        steered = self._counts.applied(self._repetition.applied(row))
        if len(self._bias_ids):
            steered = steered.copy() if steered is row else steered
            steered[self._bias_ids] += self._biases
        return steered if self._mask is None else np.where(self._mask, steered, np.float32(-math.inf))

    def _replay(self, emitted: Sequence[int]) -> None:
        if self._matcher is None or not emitted:
            return
        if not self._matcher.take(emitted):
            problem = f"do not follow the grammar ({self._matcher.problem}); all else must be as in the first request"
            raise InvalidRequest("resume.token_ids", problem)
        if self._matcher.is_complete:
            raise AlreadyComplete(f"after {len(emitted)} tokens the grammar is complete")

    def _look_ahead(self) -> None:
        """What may be chosen next; `problem` where that is nothing."""
        self._mask = self._listed if self._matcher is None else self._follows(self._matcher)
        if self._mask is None:
            return
        if self._next_number < self._request.min_tokens:
            self._mask = self._mask.copy()
            self._mask[self._stop_ids] = False
        if not self._mask.any():
            said = self._matcher.problem if self._matcher is not None else ""
            problem = f"token {self._next_number} of the completion: nothing that the request allows can stand there"
            self.problem = NoTokenLeft(f"{problem} ({said})" if said else f"{problem}; allow more, or ban less")

    def _follows(self, matcher: Matcher) -> Mask:
        """What the grammar and the lists allow; an end-of-sequence token where it ends a whole text."""
        bits = np.frombuffer(matcher.allowed(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        mask[list(matcher.eos_token_ids)] = False
        if matcher.problem:
            mask[:] = False
        elif matcher.may_end:
            mask[[token_id for token_id in matcher.eos_token_ids if token_id in self._request.stop_token_ids]] = True
        return mask if self._listed is None else mask & self._listed


class _Repetition:
    """Keskar et al. 2019, "CTRL", section 4.1, with the sign of the logit minded, as everybody does since."""

    def __init__(self, penalty: float, vocab_size: int) -> None:
        self._penalty = penalty
        self._factors = np.ones(vocab_size if penalty != 1 else 0, dtype=np.float32)  # by token id

    def take(self, token_ids: Sequence[int]) -> None:
        if len(self._factors):
            self._factors[list(token_ids)] = self._penalty

    def applied(self, row: Floats) -> Floats:
        if not len(self._factors):
            return row
        weaker = np.minimum if self._penalty > 1 else np.maximum  # which of the two it is, the sign of a logit decides
        divided, multiplied = row / self._factors, row * self._factors
        weaker(divided, multiplied, out=divided)
        return divided


class _Counts:
    """How often the completion has each token, and what that subtracts."""

    def __init__(self, steering: Steering, vocab_size: int) -> None:
        self._frequency, self._presence = steering.frequency_penalty, steering.presence_penalty
        is_on = self._frequency != 0 or self._presence != 0
        self._counts: dict[int, int] = {}
        self._offsets = np.zeros(vocab_size if is_on else 0, dtype=np.float32)  # by token id

    def take(self, token_ids: Sequence[int]) -> None:
        if len(self._offsets):
            for token_id in token_ids:
                count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
                self._offsets[token_id] = self._frequency * count + self._presence

    def applied(self, row: Floats) -> Floats:
        return row - self._offsets if len(self._offsets) else row


def _listed(steering: Steering, vocab_size: int) -> Mask | None:
    """What the lists of the request leave; None where it has none."""
    if not steering.allowed_token_ids and not steering.banned_token_ids:
        return None
    mask = np.full(vocab_size, not steering.allowed_token_ids)
    mask[list(steering.allowed_token_ids)] = True
    mask[list(steering.banned_token_ids)] = False
    return mask


def pilot_of(request: WorkRequest, vocab_size: int, grammars: Grammars) -> Pilot | None:
    """None where the logits stay as the model made them. Raises InvalidRequest, AlreadyComplete."""
    if request.steering is None:
        return None
    grammar = request.steering.grammar
    return Pilot(request, request.steering, vocab_size, grammars.begin(grammar) if grammar else None)
