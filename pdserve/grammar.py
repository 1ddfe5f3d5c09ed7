"""Structured output: a JSON schema, a regular expression or a grammar -> which tokens may come next. By llguidance.

    Grammar (text) -> source (llguidance's own form) -> checked by the router, without a tokenizer
                                                     -> compiled by a worker -> Matcher, which takes token by token

A matcher is a function of its grammar and the tokens that it has taken. The library is imported only where there is a
grammar or a tokenizer: an engine without either runs without it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest
from pdserve.steering import GRAMMAR_KINDS, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Between the parts of a JSON text; unbounded, small models would go on with it for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_MOST_COMPILED = 16  # grammars that are kept for further requests


def check_grammar(grammar: Grammar) -> None:
    """Raises InvalidRequest with what the library says, of a schema also which keyword it does not support."""
    from llguidance import LLMatcher

    source = _source(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, limits=_limits())
    if is_error:
        raise InvalidRequest(_field(grammar), "; ".join(messages))


class Matcher:
    """How far one completion is in its grammar."""

    def __init__(self, inner: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = eos_token_ids  # what they may do is not for the grammar to say
        self._inner = inner

    def take(self, token_ids: Sequence[int]) -> bool:
        """Go on; False where they do not follow the grammar, and then nothing more may be asked."""
        return self._inner.consume_tokens(list(token_ids))

    @property
    def may_end(self) -> bool:
        """Whether the text so far is a whole one."""
        return self._inner.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether it is a whole one, and nothing can follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def allowed(self) -> bytes:
        """A bit for every token of the vocabulary, the lowest first: whether it may come next."""
        return self._inner.compute_bitmask()

    @property
    def problem(self) -> str:
        """What the library says if it has given up: the grammar is too complex to go on, for example."""
        return _problem(self._inner)


class Grammars:
    """Compiles grammars for the vocabulary of one model. One thread at a time may use it."""

    def __init__(self, tokenizer: LLTokenizer | None = None, problem: str = "this model has no tokenizer") -> None:
        self._tokenizer = tokenizer
        self._problem = problem  # why there is none
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # the least recently used first

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
        """Of a model folder: half a second for a vocabulary of 50,000."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return cls()
        from llguidance import LLTokenizer

        try:
            return cls(LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None))
        except ValueError as error:  # the model can serve all the same
            return cls(None, f"this model's tokenizer cannot be used for it: {error}")

    def begin(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning. Raises InvalidRequest."""
        if self._tokenizer is None:
            raise InvalidRequest(_field(grammar), self._problem)
        if grammar not in self._compiled:
            self._compiled[grammar] = _compiled(grammar, self._tokenizer)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return Matcher(self._compiled[grammar].deep_copy(), self._tokenizer.eos_tokens)


def _limits() -> LLParserLimits:
    """Of time and memory: the library's own."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def _compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_limits())
    if matcher.is_error():
        raise InvalidRequest(_field(grammar), _problem(matcher))
    matcher.compute_bitmask()  # what this takes at first need not be repeated by every copy
    if matcher.is_error():
        raise InvalidRequest(_field(grammar), f"no text can follow it: {_problem(matcher)}")
    return matcher


def _problem(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip() if matcher.is_error() else ""


def _field(grammar: Grammar) -> str:
    return f"grammar.{grammar.kind}"


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            return _schema_source(grammar)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case _:  # of a router that is newer than this worker
            raise InvalidRequest("grammar", f"{grammar.kind!r} is unknown here; send one of {', '.join(GRAMMAR_KINDS)}")


def _schema_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(_field(grammar), f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(_field(grammar), "must be an object")
    options = schema.get("x-guidance")
    has_own = isinstance(options, dict) and any(key.startswith("whitespace") for key in options)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, {} if has_own else {"whitespace_pattern": _WHITESPACE})
    except ValueError as error:  # JSON that Python takes and the library does not
        raise InvalidRequest(_field(grammar), str(error)) from None
