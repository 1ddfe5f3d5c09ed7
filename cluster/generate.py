"""`pdserve generate`: one request, its answer on standard output as it comes, or as one JSON object at the end.

The answer's life: flags -> GenerateRequest -> `started`, deltas (printed, and kept in an `Answer`), `finished` -> JSON.
A router that dies meanwhile is a line on standard error: the answer goes on when it is back (`cluster/resumable.py`).
"""

import asyncio
import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from cluster import resumable
from cluster.flags import GenerateFlags
from pdserve import rpc
from pdserve.errors import DeadlineExceeded, InvalidRequest, PdserveError, Unavailable
from pdserve.v1 import generation_pb2 as pb

BAR_WIDTH = 40
_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class Answer:
    """All that came."""

    started: pb.Started = field(default_factory=pb.Started)
    finished: pb.Finished = field(default_factory=pb.Finished)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    steps: list[list[dict[str, Any]]] = field(default_factory=list)  # candidates of each token

    def add(self, response: pb.GenerateResponse) -> None:
        """Keep one message."""
        if response.HasField("started"):
            self.started = response.started
        elif response.HasField("finished"):
            self.finished = response.finished
        else:
            self.texts.append(response.delta.text)
            self.token_ids += response.delta.token_ids
            self.steps += [[plain(each) for each in step.candidates] for step in response.delta.top_logprobs]

    def to_plain(self) -> dict[str, Any]:
        """The object that --json prints."""
        stop_match = self.finished.stop_match
        matched = stop_match.WhichOneof("match")
        return {
            "text": "".join(self.texts),
            "token_ids": self.token_ids,
            "finish_reason": _FINISH_REASONS.get(self.finished.finish_reason, ""),
            "stop_match": {matched: getattr(stop_match, matched)} if matched else {},
            "usage": plain(self.finished.usage),
            "timings": plain(self.finished.timings),
            "workers": plain(self.finished.workers),
            "started": plain(self.started),
            **({"top_logprobs": self.steps} if self.steps else {}),
        }


def generate(flags: GenerateFlags) -> None:
    """Ask and print. Raises PdserveError."""
    if not flags.timeout > 0:
        raise InvalidRequest("timeout", f"{flags.timeout:g} is not allowed; must be more than 0 seconds")
    if not flags.resume_for_s >= 0:
        raise InvalidRequest("resume_for_s", f"{flags.resume_for_s:g} is not allowed; must be at least 0 seconds")
    logging.basicConfig(level=logging.WARNING, format="\npdserve: %(message)s")  # a line of its own amid the answer
    request = make_request(flags, _prompt(flags))
    answer = asyncio.run(_ask(flags, request))
    sys.stdout.write(json.dumps(answer.to_plain(), ensure_ascii=False) + "\n" if flags.json else "\n")


def _prompt(flags: GenerateFlags) -> str:
    """The argument, or standard input. Raises InvalidRequest when it is not text."""
    try:
        prompt = sys.stdin.buffer.read().decode() if flags.prompt == "-" else flags.prompt
        prompt.encode()  # an argument that was not UTF-8 has surrogates in it
    except UnicodeError:
        raise InvalidRequest("prompt", "is not UTF-8 text") from None
    return prompt


def make_request(flags: GenerateFlags, prompt: str) -> pb.GenerateRequest:
    """The request that the flags describe; what the wire cannot carry is an InvalidRequest."""
    request = pb.GenerateRequest(model=flags.model)
    if flags.chat:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    _set(request.sampling, flags, ("temperature", "top_k", "top_p", "min_p", "seed"))
    _set(request.stopping, flags, ("max_tokens", "ignore_eos"))
    request.stopping.stop.extend(flags.stop or [])
    _set(request, flags, ("top_logprobs",))
    return request


def bars(text: str, candidates: list[dict[str, Any]]) -> Iterator[str]:
    """One step as lines: the chosen token, then a bar per candidate, likeliest first."""
    yield f"{text!r}\n"
    width = max((len(repr(each["text"])) for each in candidates), default=0)
    for each in candidates:
        probability = math.exp(each["logprob"])
        yield f"  {each['text']!r:<{width}} {'█' * round(BAR_WIDTH * probability):<{BAR_WIDTH}} {probability:6.1%}\n"


def plain(message: Message) -> dict[str, Any]:
    """The scalar fields of a message, defaults included."""
    return {each.name: getattr(message, each.name) for each in message.DESCRIPTOR.fields}


async def _ask(flags: GenerateFlags, request: pb.GenerateRequest) -> Answer:
    answer = Answer()
    limits = resumable.Limits(flags.timeout, flags.resume_for_s)
    try:
        async with aclosing(resumable.generate(flags.address, request, limits)) as responses:
            async for response in responses:
                answer.add(response)
                if not flags.json:
                    _show(response, answer)
    except grpc.aio.AioRpcError as error:
        if answer.texts and not flags.json:
            sys.stdout.write("\n")  # the error is a line of its own
            sys.stdout.flush()
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(f"the answer was not complete within --timeout {flags.timeout:g} s") from None
        raise explained(error, flags.address) from None
    return answer


def explained(error: grpc.aio.AioRpcError, address: str) -> PdserveError:
    """The typed error, with a hint where nobody answered."""
    typed = rpc.error_of(error)
    if str(typed).startswith("UNAVAILABLE: "):  # no word of the router's own
        return Unavailable(f"{address}: {error.details()}; is `pdserve up` running there?")
    return typed


def _show(response: pb.GenerateResponse, answer: Answer) -> None:
    delta = response.delta
    if delta.top_logprobs:
        for step in answer.steps[-len(delta.top_logprobs) :]:
            sys.stdout.writelines(bars(delta.text, step))
    else:
        sys.stdout.write(delta.text)
    sys.stdout.flush()


def _set(message: Message, flags: GenerateFlags, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(flags, name)
        if value is not None:
            try:
                setattr(message, name, value)
            except (ValueError, TypeError) as error:  # outside the field's type
                raise InvalidRequest(name, str(error)) from None
