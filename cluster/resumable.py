"""One answer over any number of connections: where a stream breaks, the next one goes on.

    request -> responses, kept -> the router dies or shuts down -> the request with `resume` -> the responses behind

Whoever reads sees one stream: for every choice one `started`, every token and every character once, one `finished`. A
router that was killed knows nothing any more, but its client still has all that it received. Of several choices each
that has not finished goes on by a request of its own; what comes is one stream again.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from pdserve import rpc
from pdserve.errors import ProtocolError
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1.generation_pb2_grpc import GenerationServiceStub

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
# A router that has just started knows no workers yet, and has all its clients back at once.
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How long to wait for what."""

    timeout_s: float = 600.0  # for the whole answer
    resume_for_s: float = 30.0  # from a break to the next response; 0: never reconnect


async def generate(
    address: str, request: pb.GenerateRequest, limits: Limits
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """As the stub's Generate, over as many connections as it takes; `usage.resumes` counts those, too.

    Raises AioRpcError: a router's refusal, the last error when `resume_for_s` is over, and DEADLINE_EXCEEDED. A router
    that was never reached is no break. Close the generator where you stop reading early.
    """
    answer, patience = _Answer(request), _Patience(limits)
    while not answer.has_begun:
        async with aclosing(_connection(address, answer.request(), patience)) as responses:
            async for response in responses:
                if answer.add(response):
                    yield response
        if not patience.is_broken:
            return
    async with aclosing(_merged([_rest(address, each, copy(patience)) for each in answer.unfinished()])) as responses:
        async for response in responses:
            yield response


async def _rest(address: str, kept: "_Kept", patience: "_Patience") -> AsyncGenerator[pb.GenerateResponse, None]:
    """What is missing of one choice."""
    while patience.is_broken:
        async with aclosing(_connection(address, kept.request(), patience)) as responses:
            async for response in responses:
                if kept.add(response):
                    yield kept.numbered(response)


async def _connection(
    address: str, request: pb.GenerateRequest, patience: "_Patience"
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """What comes over one connection; where that breaks, it ends when it is time for the next one."""
    async with rpc.client_channel(address) as channel, patience.trying(channel):  # new: with no back-off of its own
        async for response in GenerationServiceStub(channel).Generate(request, timeout=patience.left_s()):
            patience.goes_on()
            if response.HasField("finished"):
                response.finished.usage.resumes += patience.num_breaks
            yield response


async def _merged(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Items as they come; a stream is asked for its next one when its last one was taken. Closes all in the end."""
    asked = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = asked.pop(task)
                if (item := task.result()) is not None:
                    yield item
                    asked[asyncio.ensure_future(anext(stream, None))] = stream
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


class _Answer:
    """What was received of all choices before the first break."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._choices: dict[int, _Kept] = {}

    @property
    def has_begun(self) -> bool:
        """Whether every choice can go on by itself; no token comes before."""
        return len(self._choices) >= max(1, self._request.n)

    def unfinished(self) -> list["_Kept"]:
        """The choices of which something is missing."""
        return [kept for kept in self._choices.values() if not kept.is_finished]

    def add(self, response: pb.GenerateResponse) -> bool:
        """Keep one message; False when it tells nothing new. Raises ProtocolError on a gap."""
        index = _index_of(response)
        if response.HasField("started") and index not in self._choices:
            self._choices[index] = _Kept(self._request, response.started)
            return True
        if index not in self._choices:
            raise ProtocolError(f"choice {index} went on before it had started")
        return self._choices[index].add(response)

    def request(self) -> pb.GenerateRequest:
        """All of it, with the seed that was told already."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        if 0 in self._choices and not request.HasField("resume"):
            request.sampling.seed = self._choices[0].started.seed
        return request


class _Kept:
    """What was received of one choice: enough to ask for the rest."""

    def __init__(self, request: pb.GenerateRequest, started: pb.Started) -> None:
        self.started = started
        self._request = request
        self._token_ids = list(request.resume.token_ids)
        self._text_length = request.resume.text_length
        self._last_scored = 0  # position in the prompt
        self.is_finished = False

    def add(self, response: pb.GenerateResponse) -> bool:
        """Keep one message; False when it tells nothing new. Raises ProtocolError on a gap."""
        if response.HasField("started"):
            return False
        if response.HasField("prompt_logprobs"):
            return self._add_scores(response.prompt_logprobs)
        self.is_finished = response.HasField("finished")
        delta = response.delta
        if delta.token_ids and delta.token_number != len(self._token_ids):
            raise ProtocolError(f"token {delta.token_number} came where {len(self._token_ids)} was the next")
        self._token_ids += delta.token_ids
        self._text_length += len(delta.text)
        return True

    def _add_scores(self, scores: pb.PromptLogprobs) -> bool:
        """They are sent again where no token had come yet."""
        is_new = scores.first_position > self._last_scored
        self._last_scored = max(self._last_scored, scores.first_position + len(scores.tokens) - 1)
        return is_new

    def request(self) -> pb.GenerateRequest:
        """The request for what is missing."""
        resume = pb.Resume(
            token_ids=self._token_ids,
            seed=self.started.seed,
            model_fingerprint=self.started.model_fingerprint,
            prompt_tokens=self.started.prompt_tokens,
            text_length=self._text_length,
        )
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.MergeFrom(pb.GenerateRequest(request_id=self.started.request_id))
        request.resume.CopyFrom(resume)
        request.ClearField("n")
        request.sampling.ClearField("seed")
        if self.started.index:
            request.ClearField("prompt_logprobs")  # told with the first choice
        return request

    def numbered(self, response: pb.GenerateResponse) -> pb.GenerateResponse:
        """A response to `request`, as one of this choice."""
        match response.WhichOneof("event"):
            case "delta":
                response.delta.index = self.started.index
            case "finished":
                response.finished.index = self.started.index
        return response


def _index_of(response: pb.GenerateResponse) -> int:
    """Which choice a message belongs to; the prompt's scores come with the first."""
    return max(response.started.index, response.delta.index, response.finished.index)


class _Patience:
    """When to try again, and when to give up."""

    def __init__(self, limits: Limits) -> None:
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + limits.timeout_s
        self._resume_for_s = limits.resume_for_s
        self._give_up_at: float | None = None  # None: not broken
        self._next_wait_s = FIRST_WAIT_S
        self.num_breaks = 0

    @property
    def is_broken(self) -> bool:
        """Whether nothing has come since the last break."""
        return self._give_up_at is not None

    def left_s(self) -> float:
        """Of the whole answer's time."""
        return self._deadline - self._now()

    def goes_on(self) -> None:
        """A response came: the next break is a new one."""
        self._give_up_at, self._next_wait_s = None, FIRST_WAIT_S

    @asynccontextmanager
    async def trying(self, channel: grpc.aio.Channel) -> AsyncIterator[None]:
        """Swallow a break, and wait until it is time for the next try."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if not self._may_mend(error, channel.get_state()):
                raise
            self._note_break(error)
            wait_s, self._next_wait_s = self._next_wait_s, min(2 * self._next_wait_s, LONGEST_WAIT_S)
            await asyncio.sleep(max(0.0, min(wait_s * random.uniform(0.5, 1.0), self.left_s())))

    def _may_mend(self, error: grpc.aio.AioRpcError, state: grpc.ChannelConnectivity) -> bool:
        """A refusal by a router that stays is its last word, except to a client that has just come back to it."""
        if self._give_up_at is not None:
            return error.code() in _PASSING and self._now() < self._give_up_at
        if error.code() is not grpc.StatusCode.UNAVAILABLE or self._resume_for_s <= 0:
            return False
        if rpc.is_refusal(error):
            return state is not grpc.ChannelConnectivity.READY  # it is shutting down
        return state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE  # else nobody was there

    def _note_break(self, error: grpc.aio.AioRpcError) -> None:
        if self._give_up_at is None:
            self._give_up_at = self._now() + self._resume_for_s
            self.num_breaks += 1
            _log.warning("the stream broke (%s); reconnecting for up to %g s", error.details(), self._resume_for_s)
