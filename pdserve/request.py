"""A request as the workers see it: token ids and numbers, no text.

The router makes one `WorkRequest` per client request and attempt. Everything that decides the next token is a
function of this object and the tokens so far, so that any worker can go on where another one stopped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NewType

from pdserve.errors import InvalidRequest
from pdserve.steering import Steering, check_steering

MAX_TOP_LOGPROBS = 20
WorkerId = NewType("WorkerId", str)  # stable over restarts: "prefill-0"
Incarnation = NewType("Incarnation", str)  # drawn anew at every start of a worker


@dataclass(frozen=True)
class Ticket:
    """A decode worker's promise of room for one attempt: "push the KV here".

    The pair (incarnation, counter) is its identity: a later attempt of the same request has another ticket.
    """

    worker: WorkerId
    incarnation: Incarnation
    counter: int
    cached_pages: int = 0  # whole pages of the prompt that decode holds already: not to be pushed


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature, top-k, top-p, min-p, then argmax of logit / T + Gumbel noise."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits


@dataclass(frozen=True)
class WorkRequest:
    """What a worker needs to know of a request. `token_ids` is the prompt, plus what was emitted before a resume."""

    label: str  # the client's request id: for logs, never a key
    token_ids: tuple[int, ...]
    prompt_length: int  # tokens of the prompt alone, after truncation
    sampling: Sampling
    max_tokens: int  # completion tokens in all, earlier attempts included
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # EOS folded in by the router
    top_logprobs: int = 0  # candidates to report per step
    steering: Steering | None = None  # None: the logits stay as the model made them
    logprobs: bool = False  # of the chosen token; with `top_logprobs` it comes along
    logprobs_as_drawn: bool = False  # after temperature and filters; else as the model made them
    prompt_logprobs: int | None = None  # candidates for each prompt token; None: no prompt token is scored

    @property
    def num_emitted(self) -> int:
        """Completion tokens that earlier attempts delivered."""
        return len(self.token_ids) - self.prompt_length

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens are to be scored."""
        return self.logprobs or self.top_logprobs > 0

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt tokens are to be scored: once, before the first token. All of them must be computed then."""
        return self.prompt_logprobs is not None and self.num_emitted == 0

    def resumed(self, emitted: Sequence[int]) -> "WorkRequest":
        """The request of the next attempt, after `emitted` tokens of this one were delivered."""
        return replace(self, token_ids=(*self.token_ids, *emitted))

    @property
    def max_length(self) -> int:
        """Length of prompt and completion together when the request ends by length."""
        return self.prompt_length + self.max_tokens


@dataclass(frozen=True)
class Candidate:
    """One entry of a step's top log-probabilities."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, and the likeliest ones in its place."""

    chosen: Candidate
    top: tuple[Candidate, ...]


@dataclass(frozen=True)
class Token:
    """One generated token. `number` counts completion tokens from 0."""

    number: int
    token_id: int
    top_logprobs: tuple[Candidate, ...] = ()
    finish: str = ""  # "": goes on; "stop_token", "length" or "grammar" (it is complete): this was the last
    logprob: float | None = None  # where asked for


def check(request: WorkRequest, vocab_size: int, window: int) -> None:
    """What a worker relies on, whoever sent it. Raises InvalidRequest; the router's own checks come first."""
    sampling, length = request.sampling, len(request.token_ids)
    rules = (
        ("prompt", "at least one token", 0 < request.prompt_length <= length),
        ("prompt", f"token ids below {vocab_size}", max(request.token_ids, default=0) < vocab_size),
        ("max_tokens", "more than the tokens emitted so far", request.num_emitted < request.max_tokens),
        ("max_tokens", f"prompt and completion fit the window of {window}", request.max_length <= window),
        ("temperature", "in [0, inf)", 0 <= sampling.temperature < math.inf),
        ("top_k", "at least 0", sampling.top_k >= 0),
        ("top_p", "in (0, 1]", 0 < sampling.top_p <= 1),
        ("min_p", "in [0, 1]", 0 <= sampling.min_p <= 1),
        ("top_logprobs", f"at most {MAX_TOP_LOGPROBS}", request.top_logprobs <= MAX_TOP_LOGPROBS),
        ("prompt_logprobs", f"at most {MAX_TOP_LOGPROBS}", (request.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS),
    )
    for field, allowed, holds in rules:
        if not holds:
            raise InvalidRequest(field, allowed)
    if request.steering is not None:
        check_steering(request.steering, vocab_size)


def finish_after(request: WorkRequest, number: int, token_id: int) -> str:
    """Whether completion token `number` ends the request: "", "stop_token" or "length"."""
    if token_id in request.stop_token_ids and number + 1 > request.min_tokens:
        return "stop_token"
    return "length" if number + 1 >= request.max_tokens else ""
