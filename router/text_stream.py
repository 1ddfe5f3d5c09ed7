"""Tokens of one completion -> its text, piece by piece: no half characters, and nothing from a stop string on.

    token id -> decoder (bytes become characters) -> stop finder (text that may still be a stop string waits) -> text

Stop strings: the match that is *complete first* wins; of those that end at the same character the longest. So the
result is the same wherever token borders fall. The text ends before the match.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from router.tokenizer import TextModel

_MAX_PENDING = 16  # tokens; a character has at most four, so more are no beginning of one


@dataclass(frozen=True)
class TextStep:
    """What one token adds: text that is decided now, and the stop string that is complete now."""

    text: str
    matched: str | None = None


class TextStream:
    """One completion. After a match nothing more may be pushed."""

    def __init__(self, text_model: TextModel, stop: Sequence[str] = ()) -> None:
        self._decoder = _decoder(text_model)
        self._finder = StopFinder(stop)

    def push(self, token_id: int) -> TextStep:
        """Take one token; special tokens carry no text."""
        return self._finder.push(self._decoder.step(token_id))

    def finish(self) -> TextStep:
        """All that was withheld; a character that never became complete is U+FFFD."""
        step = self._finder.push(self._decoder.flush())
        return step if step.matched is not None else TextStep(step.text + self._finder.flush())


class StopFinder:
    """Finds stop strings in text that comes in parts."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._beginnings = {string[:end] for string in stop for end in range(1, len(string))}
        self._held = ""  # the longest end of the text so far that a stop string may begin with

    def push(self, text: str) -> TextStep:
        """Take more text; give what can no longer belong to a stop string."""
        if not self._stop:
            return TextStep(text)
        held = self._held + text
        matches = [(start + len(string), start, string) for string in self._stop if (start := held.find(string)) >= 0]
        if matches:
            _, start, string = min(matches)
            self._held = ""
            return TextStep(held[:start], string)
        keep_from = self._first_beginning(held)
        self._held = held[keep_from:]
        return TextStep(held[:keep_from])

    def flush(self) -> str:
        """Give up waiting."""
        held, self._held = self._held, ""
        return held

    def _first_beginning(self, held: str) -> int:
        starts = range(max(0, len(held) - self._longest + 1), len(held))
        return next((start for start in starts if held[start:] in self._beginnings), len(held))


class _Decoder(Protocol):
    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def _decoder(text_model: TextModel) -> _Decoder:
    if text_model.tokenizer is None:
        return _NoText()
    return _ByteDecoder(text_model) if text_model.byte_level else _LibraryDecoder(text_model.tokenizer)


class _NoText:
    """A model without tokenizer: tokens stay ids."""

    def step(self, token_id: int) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class _ByteDecoder:
    """Byte-level models: the text is the UTF-8 of the tokens' bytes.

    DecodeStream gives the same text, but decodes everything that it holds anew at each token: a model that babbles
    continuation bytes would cost the event loop 0.7 ms a token after 4,000 of them. Here every token costs the same.
    """

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        self._special = text_model.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        return self._utf8.decode(self._text_model.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _LibraryDecoder:
    """All other models, by the library's DecodeStream: it holds tokens until they are whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []  # tokens whose text went out last, to decode the next ones as a continuation
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._library_step(token_id)
        if text is None and len(self._pending) < _MAX_PENDING:
            return ""
        if text is None:
            text = self._restarted()
        self._context, self._pending = self._pending, []
        return text

    def _library_step(self, token_id: int) -> str | None:
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # nothing narrower is raised when bytes turn text invalid that was given out already
            return self._restarted()
        return None if text is None else str(text)

    def _restarted(self) -> str:
        self._stream = DecodeStream(skip_special_tokens=True)
        return self.flush()

    def flush(self) -> str:
        known = self._tokenizer.decode(self._context, skip_special_tokens=True)
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)
        return str(text[len(known) :])
