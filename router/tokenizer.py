"""A model's text side, read from its Hugging Face folder: text <-> token ids, pieces with byte offsets, chat prompts.

Most models are byte-level: a token is a run of bytes, and a character may be split over tokens. For those the true
bytes are computed here from the byte-level alphabet, because the tokenizers library only knows whole characters.
A folder without tokenizer.json is allowed; then only prompts in token ids work.

A `TextModel` may be used from several threads. Tokenizing a long prompt takes longer
than an event loop may be blocked: `in_thread_if_long` moves it away.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tokenizers import Encoding, Tokenizer

from pdserve.errors import ConfigError, InvalidRequest
from router.chat import ChatTemplate, Message

MAX_TEXT_CHARACTERS = 500_000  # a window of 128k tokens, and some
LONG_TEXT_BYTES = 4096  # one to four milliseconds of tokenizing

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how tokenizers without byte alphabet write a single byte


@dataclass(frozen=True)
class Piece:
    """One token of a text. `start` and `end` are byte offsets into the text's UTF-8; an added BOS covers nothing."""

    id: int
    piece: bytes  # the token's own bytes
    start: int
    end: int


@dataclass(frozen=True)
class TextSettings:
    """What tokenizer_config.json and chat_template.jinja say; all of it optional."""

    bos_token: str = ""
    eos_token: str = ""
    add_bos_token: bool | None = None  # None: as the post-processor in tokenizer.json does
    chat_template: str = ""


class TextModel:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer | None = None, settings: TextSettings | None = None) -> None:
        self.tokenizer = tokenizer
        self._settings = settings = settings or TextSettings()
        self._chat = None
        if settings.chat_template:
            self._chat = ChatTemplate(settings.chat_template, settings.bos_token, settings.eos_token)
        decoder = _decoder_settings(tokenizer)
        self.byte_level = json.loads(decoder).get("type") == "ByteLevel"
        self._byte_fallback = "ByteFallback" in decoder
        self._space = "▁" if "▁" in decoder else " "
        self._byte_of = _byte_alphabet()
        self._known_bytes: dict[int, bytes] = {}  # grows up to the vocabulary
        self.special_ids = _special_ids(tokenizer)  # tokens that carry no text, such as end-of-sequence

    @staticmethod
    def load(folder: Path) -> "TextModel":
        """Read a model folder. Raises ConfigError when a file is there and cannot be used."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return TextModel()
        return TextModel(_read_tokenizer(path), _read_settings(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._chat is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with BOS where the model wants one. Raises InvalidRequest without tokenizer."""
        encoding = self._encoded(text)
        return [*self._missing_bos(encoding), *encoding.ids]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat prompt; its special tokens come from the template alone. Raises InvalidRequest."""
        text = self.render_chat(messages)
        return list(self._encode(text, add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt text of a chat. Raises InvalidRequest."""
        if self._chat is None:
            raise InvalidRequest("chat", "this model has no chat template; send text or token_ids")
        return self._chat.render(messages)

    def pieces(self, text: str) -> list[Piece]:
        """The tokens of a plain prompt; their bytes, joined, are the text for byte-level models."""
        encoding = self._encoded(text)
        added = [Piece(token_id, self.token_bytes(token_id), 0, 0) for token_id in self._missing_bos(encoding)]
        return added + self._pieces_of(text, encoding)

    def chat_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """The tokens of a chat prompt; offsets count in the rendered text."""
        text = self.render_chat(messages)
        return self._pieces_of(text, self._encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; invalid or incomplete UTF-8 becomes U+FFFD, ids without token nothing."""
        return str(self._required().decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, special tokens by their name; empty where there is no such token."""
        known = self._known_bytes.get(token_id)
        if known is not None:
            return known
        token = self.tokenizer.id_to_token(token_id) if self.tokenizer else None
        if token is None:
            return b""
        return self._known_bytes.setdefault(token_id, self._bytes_of(token))

    def token_text(self, token_id: int) -> str:
        """A token's own text; incomplete characters are U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            # A token with a character outside the alphabet was added by hand and stands for itself.
            in_alphabet = all(character in self._byte_of for character in token)
            return bytes(self._byte_of[character] for character in token) if in_alphabet else token.encode()
        if self._byte_fallback and (match := _FALLBACK_BYTE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(self._space, " ").encode()

    def _encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Bounded in time and memory: about 0.2 kB a character. Only a batch lets other threads run meanwhile."""
        if len(text) > MAX_TEXT_CHARACTERS:
            raise InvalidRequest("text", f"{len(text)} characters, at most {MAX_TEXT_CHARACTERS} are taken")
        return self._required().encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _required(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("prompt", "this model has no tokenizer; send token_ids, without stop strings")
        return self.tokenizer

    def _encoded(self, text: str) -> Encoding:
        return self._encode(text, add_special_tokens=self._settings.add_bos_token is not False)

    def _missing_bos(self, encoding: Encoding) -> list[int]:
        """The BOS that the configuration asks for and the post-processor did not add."""
        if not self._settings.add_bos_token:
            return []
        bos_id = self._required().token_to_id(self._settings.bos_token)
        return [] if bos_id is None or encoding.ids[:1] == [bos_id] else [bos_id]

    def _pieces_of(self, text: str, encoding: Encoding) -> list[Piece]:
        pieces = [self.token_bytes(token_id) for token_id in encoding.ids]
        covered = [b"" if added else piece for piece, added in zip(pieces, encoding.special_tokens_mask, strict=True)]
        # Normalizers and prefix spaces make pieces differ from the text; then only whole characters can be told apart.
        exact = self.byte_level and b"".join(covered) == text.encode()
        spans = _spans_of_pieces(covered) if exact else _spans_of_characters(text, encoding.offsets)
        return [Piece(i, piece, *span) for i, piece, span in zip(encoding.ids, pieces, spans, strict=True)]


async def in_thread_if_long(size_bytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Do `work` on a text of `size_bytes` here when it is short, in a thread when it would block the event loop."""
    if size_bytes <= LONG_TEXT_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _spans_of_pieces(pieces: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    ends = list(accumulate(map(len, pieces), initial=0))
    return pairwise(ends)


def _spans_of_characters(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    byte_at = list(accumulate((len(character.encode()) for character in text), initial=0))
    return ((byte_at[start], byte_at[end]) for start, end in offsets)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: visible Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    visible = [byte for byte in range(256) if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _decoder_settings(tokenizer: Tokenizer | None) -> str:
    """JSON of the decoder, which says how tokens become text."""
    if tokenizer is None or tokenizer.decoder is None:
        return "{}"
    return bytes(tokenizer.decoder.__getstate__()).decode()


def _special_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: not a tokenizer: {error}") from error
    # Some files keep the padding and truncation of their training.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_settings(folder: Path) -> TextSettings:
    path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _read_json(path) if path.exists() else {}
    template = _chat_template(config.get("chat_template"))
    if template_path.exists():
        template = template_path.read_text(encoding="utf-8")
    return TextSettings(
        bos_token=_token_name(config.get("bos_token")),
        eos_token=_token_name(config.get("eos_token")),
        add_bos_token=config.get("add_bos_token"),
        chat_template=template,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold an object")
    return value


def _chat_template(value: Any) -> str:
    """A template is a string, or a list of named ones."""
    if isinstance(value, list):
        return next((str(entry["template"]) for entry in value if entry.get("name") == "default"), "")
    return value or ""


def _token_name(value: Any) -> str:
    """A token is written as a string or as an object with `content`."""
    return str(value["content"]) if isinstance(value, dict) else value or ""
