"""`pdserve generate`: one request, its answer on standard output as it comes, or as one JSON object at the end.

The answer's life: flags -> GenerateRequest -> `started`, deltas (kept in `Answers`, and printed), `finished` -> JSON.
Several choices are printed one after the other, whatever comes first. A router that dies meanwhile is a line on
standard error: the answer goes on when it is back (`cluster/resumable.py`).
"""

import asyncio
import json
import logging
import sys
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

import grpc.aio
from google.protobuf.message import Message

from cluster import resumable
from cluster.answers import Answers
from cluster.flags import GenerateFlags
from pdserve import rpc
from pdserve.errors import DeadlineExceeded, InvalidRequest, PdserveError, Unavailable
from pdserve.v1 import generation_pb2 as pb

MAX_TIMEOUT_S = 1e8  # three years; gRPC's clock ends somewhere behind that
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def generate(flags: GenerateFlags) -> None:
    """Ask and print. Raises PdserveError."""
    if not 0 < flags.timeout <= MAX_TIMEOUT_S:
        problem = f"{flags.timeout:g} is not allowed; must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds"
        raise InvalidRequest("timeout", problem)
    if not flags.resume_for_s >= 0:
        raise InvalidRequest("resume_for_s", f"{flags.resume_for_s:g} is not allowed; must be at least 0 seconds")
    logging.basicConfig(level=logging.WARNING, format="\npdserve: %(message)s")  # a line of its own amid the answer
    if [flags.prompt, flags.json_schema, flags.grammar].count("-") > 1:
        raise InvalidRequest("prompt, json_schema, grammar", "only one of them can be -, standard input")
    _check_text(flags)
    request = make_request(flags, _text_of("prompt", "-") if flags.prompt == "-" else flags.prompt)
    answers = asyncio.run(_ask(flags, request))
    if flags.json:
        sys.stdout.write(json.dumps(answers.to_plain(), ensure_ascii=False) + "\n")


def _check_text(flags: GenerateFlags) -> None:
    """An argument that was not UTF-8 has surrogates in it, which no message can carry. Raises InvalidRequest."""
    for name, value in asdict(flags).items():
        for text in value if isinstance(value, list) else [value]:
            try:
                str(text).encode()
            except UnicodeError:
                raise InvalidRequest(name, "is not UTF-8 text") from None


def _text_of(name: str, path: str) -> str:
    """What a file holds, or standard input. Raises InvalidRequest."""
    try:
        return sys.stdin.buffer.read().decode() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeError:
        raise InvalidRequest(name, "is not UTF-8 text") from None
    except OSError as error:
        raise InvalidRequest(name, f"takes the name of a file, or - for standard input: {error}") from None


def make_request(flags: GenerateFlags, prompt: str) -> pb.GenerateRequest:
    """The request that the flags describe; what the wire cannot carry is an InvalidRequest."""
    request = pb.GenerateRequest(model=flags.model)
    if flags.chat:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    _set(request.sampling, flags, SAMPLING)
    _set(request.stopping, flags, ("max_tokens", "min_tokens", "ignore_eos"))
    request.stopping.stop.extend(flags.stop or [])
    _set(request, flags, ("n", "logprobs", "top_logprobs"))
    _set_grammar(request, flags)
    return request


def _set_grammar(request: pb.GenerateRequest, flags: GenerateFlags) -> None:
    """At most one of three, two of them in files."""
    if sum(each is not None for each in (flags.json_schema, flags.regex, flags.grammar)) > 1:
        raise InvalidRequest("json_schema, regex, grammar", "only one of them can be set")
    if flags.json_schema is not None:
        request.grammar.json_schema = _text_of("json_schema", flags.json_schema)
    if flags.regex is not None:
        request.grammar.regex = flags.regex
    if flags.grammar is not None:
        request.grammar.lark = _text_of("grammar", flags.grammar)


async def _ask(flags: GenerateFlags, request: pb.GenerateRequest) -> Answers:
    answers = Answers(several=request.n > 1)
    limits = resumable.Limits(flags.timeout, flags.resume_for_s)
    try:
        async with aclosing(resumable.generate(flags.address, request, limits)) as responses:
            async for response in responses:
                answers.add(response)
                if not flags.json:
                    sys.stdout.writelines(answers.fresh())
                    sys.stdout.flush()
    except grpc.aio.AioRpcError as error:
        if not (answers.is_empty or flags.json):
            sys.stdout.write("\n")  # the error is a line of its own
            sys.stdout.flush()
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(f"the answer was not complete within --timeout {flags.timeout:g} s") from None
        raise explained(error, flags.address) from None
    if request.HasField("grammar") and answers.is_cut:
        sys.stderr.write("pdserve: the answer was cut before it was whole; allow more --max-tokens\n")
    return answers


def explained(error: grpc.aio.AioRpcError, address: str) -> PdserveError:
    """The typed error, with a hint where nobody answered."""
    typed = rpc.error_of(error)
    if str(typed).startswith("UNAVAILABLE: "):  # no word of the router's own
        return Unavailable(f"{address}: {error.details()}; is `pdserve up` running there?")
    return typed


def _set(message: Message, flags: GenerateFlags, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(flags, name)
        if value is not None:
            try:
                setattr(message, name, value)
            except (ValueError, TypeError) as error:  # outside the field's type
                raise InvalidRequest(name, str(error)) from None
