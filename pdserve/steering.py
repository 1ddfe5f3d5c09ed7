"""What a request asks of the logits, beside temperature and filters: plain data, in token ids.

A worker turns it into the engine's `Pilot`, which applies it at every step. All of it is a function of the token list,
so a resumed request is steered as if it had never been interrupted.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pdserve.errors import InvalidRequest

GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "lark")


@dataclass(frozen=True)
class Grammar:
    """What the text of a completion must follow; see pdserve/grammar.py."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True)
class Steering:
    """Penalties, bias, and which tokens may be chosen at all; applied in the order of the fields."""

    repetition_penalty: float = 1.0  # of tokens in prompt and completion: divides positive logits, multiplies negative
    frequency_penalty: float = 0.0  # subtracted as often as the completion has the token
    presence_penalty: float = 0.0  # subtracted where the completion has the token
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added; each id once
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


UNSTEERED = Steering()


def check_steering(steering: Steering, vocab_size: int) -> None:
    """What a worker relies on, whoever sent it. Raises InvalidRequest; the router's own checks come first."""
    token_ids = (*(bias[0] for bias in steering.logit_bias), *steering.allowed_token_ids, *steering.banned_token_ids)
    offsets = (steering.frequency_penalty, steering.presence_penalty, *(bias[1] for bias in steering.logit_bias))
    rules = (
        ("repetition_penalty", "in (0, inf)", 0 < steering.repetition_penalty < math.inf),
        ("penalties and logit_bias", "finite", all(map(math.isfinite, offsets))),
        ("logit_bias and token lists", f"token ids below {vocab_size}", max(token_ids, default=0) < vocab_size),
    )
    for field, allowed, holds in rules:
        if not holds:
            raise InvalidRequest(field, allowed)
