"""Chat messages -> the prompt text that the model was trained on, by the model's own template.

Templates are programs that come with a model folder, so they run sandboxed. The environment offers what published
templates use: loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `generation` blocks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import ConfigError, InvalidRequest

ROLES = ("system", "user", "assistant")

# What a template raises when messages do not suit it: its own refusal, or plain Python errors inside expressions.
_RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Raises ConfigError when `source` is not a template."""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text, special tokens included, open for the assistant's answer. Raises InvalidRequest."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=True, tools=None, documents=None, **self._tokens
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest("chat", f"the model's chat template refuses these messages: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
