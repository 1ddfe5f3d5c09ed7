"""A router's side of a prefill worker: one call per attempt.

    prefill ──> (scores of the prompt, where asked for) ──> Sampled: the first token ──> Pushed: decode has all the KV

Leaving `prefill`'s block cancels the call, and with it all that the worker does for it. A call and its ticket share
their fate until decode has all the KV: what ends one ends the other. When the worker is lost, every open call fails at
once with `WorkerLost`, whatever gRPC still believes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from pdserve import rpc
from pdserve.errors import LegFailed, PdserveError, Unavailable, WorkerLost
from pdserve.internal.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.request import Scored, Token, WorkerId, WorkRequest
from pdserve.wire import request_to_wire, scored_from_wire, ticket_to_wire, token_from_wire
from router.decode_client import HeldTicket
from router.rank import QueuedPrompts


@dataclass(frozen=True)
class Sampled:
    """The first token, sent the moment it is sampled."""

    token: Token
    computed_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Pushed:
    """Decode acknowledged the last payload."""

    kv_bytes: int
    at: float  # seconds on the event loop's clock


class PrefillCall:
    """One call that is open."""

    def __init__(self, held: HeldTicket | None) -> None:
        loop = asyncio.get_running_loop()
        self.pushed: Pushed | None = None
        self.scores: list[Scored] = []  # of the prompt's tokens, all there before `sampled`
        self._sampled: asyncio.Future[Sampled] = loop.create_future()
        self._held = held
        if held is not None:
            held.failed.add_done_callback(self._ticket_ended)

    async def sampled(self) -> Sampled:
        """Wait for the first token. Raises PdserveError: the call's own, or what ended the ticket."""
        return await self._sampled  # ends with the call, at the latest with the worker

    def take(self, response: prefill_pb2.PrefillResponse) -> None:
        """Note what the worker says."""
        match response.WhichOneof("event"):
            case "scores":
                self.scores += map(scored_from_wire, response.scores.tokens)
            case "sampled" if not self._sampled.done():
                said = response.sampled
                self._sampled.set_result(Sampled(token_from_wire(said.token), said.computed_tokens, said.cached_tokens))
            case "pushed":
                self.pushed = Pushed(response.pushed.kv_bytes, asyncio.get_running_loop().time())

    def _ticket_ended(self, failed: "asyncio.Future[PdserveError]") -> None:
        if not failed.cancelled():
            self.fail(failed.result())

    def fail(self, error: PdserveError) -> None:
        """End it; after `pushed` nothing is left to fail."""
        if not self._sampled.done():
            self._sampled.set_exception(error)
            self._sampled.exception()  # looked at: its owner may have gone
        if self._held is not None and self.pushed is None:
            self._held.lose_prefill(error)


class PrefillClient:
    """Calls to one incarnation of a prefill worker."""

    def __init__(self, worker: WorkerId, channel: grpc.aio.Channel) -> None:
        self._worker = worker
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._open: dict[PrefillCall, None] = {}
        self._lost: PdserveError | None = None
        self.queued = QueuedPrompts()

    @asynccontextmanager
    async def prefill(
        self, request: WorkRequest, held: HeldTicket | None, priority: int = 0
    ) -> AsyncIterator[PrefillCall]:
        """Keep a call open for the time of the block. Raises PdserveError when the worker is lost already."""
        if self._lost is not None:
            raise self._lost
        message = prefill_pb2.PrefillRequest(request=request_to_wire(request), priority=priority)
        if held is not None:
            message.ticket.CopyFrom(ticket_to_wire(held.ticket))
        call = PrefillCall(held)
        self._open[call] = None
        pump = asyncio.create_task(self._pump(message, call))
        try:
            yield call
        finally:
            del self._open[call]
            pump.cancel()

    async def _pump(self, message: prefill_pb2.PrefillRequest, call: PrefillCall) -> None:
        try:
            async for response in self._stub.Prefill(message):
                call.take(response)
            call.fail(LegFailed(f"{self._worker} ended the call early"))
        except grpc.aio.AioRpcError as failure:
            call.fail(self._error(failure))
        except Exception as error:  # root of the task: a closed channel raises what it likes
            call.fail(WorkerLost(f"{self._worker}: {error}"))

    def _error(self, failure: grpc.aio.AioRpcError) -> PdserveError:
        error = rpc.error_of(failure)
        return WorkerLost(f"{self._worker}: {error}") if type(error) is Unavailable else error

    def fail(self, error: PdserveError) -> None:
        """End every open call, and refuse new ones, with `error`."""
        self._lost = error
        for call in list(self._open):
            call.fail(error)
