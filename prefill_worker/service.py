"""The gRPC face of a prefill worker: one call per request, open until decode has all the KV.

Leaving the call for any reason (router gone, cancelled, failed) submits `Cancel`: the engine frees its pages.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc.aio

from pdserve import rpc
from pdserve.errors import LegFailed, LinkDown, PdserveError, ProtocolError
from pdserve.handover import PageRun
from pdserve.internal.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.request import Ticket
from pdserve.wire import request_from_wire, scored_to_wire, ticket_from_wire, token_to_wire
from prefill_worker.commands import (
    Abort,
    Cancel,
    Command,
    Done,
    Failed,
    PromptScored,
    Push,
    PushEnded,
    Sampled,
    Start,
    StepUpdate,
)
from transport.base import SendLink, SendLinks

SCORES_PER_MESSAGE = 256  # at most 70 kB, whatever the chunk
LINK_WAIT_S = 3.0  # a decode worker that has just registered gets its link within this time

_Event = PromptScored | Sampled | Done | Failed
_Context = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Turns calls into commands, and the engine's updates into answers and payloads."""

    def __init__(self, submit: Callable[[Command], None], links: SendLinks) -> None:
        self._submit = submit
        self._links = links
        self._numbers = itertools.count()
        self._events: dict[int, asyncio.Queue[_Event]] = {}
        self._pushes: set[asyncio.Task[None]] = set()

    # A coroutine that writes, not an async generator: gRPC would leave a cancelled generator to the garbage collector.
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serve one call; see prefill.proto."""
        number = next(self._numbers)
        events = self._events[number] = asyncio.Queue()
        try:
            ticket = ticket_from_wire(request.ticket) if request.HasField("ticket") else None
            link = await self._link(ticket) if ticket else None
            self._submit(Start(number, request_from_wire(request.request), ticket, link, request.priority))
            await _answer(events, context)
        except PdserveError as error:
            await rpc.abort(context, error)
        finally:
            del self._events[number]
            self._submit(Cancel(number))

    async def _link(self, ticket: Ticket) -> SendLink:
        await self._links.wait_up(ticket.worker, LINK_WAIT_S)
        return self._links.link(ticket.worker, ticket.incarnation)

    async def watch_aborts(self) -> None:
        """Bring what decode workers want nothing more of to the engine, until cancelled."""
        async for incarnation, meta, reason in self._links.aborts():
            with suppress(ProtocolError):  # an abort that names no ticket ends none
                self._submit(Abort(incarnation, PageRun.unpack(meta).counter, reason))

    def deliver(self, update: StepUpdate) -> None:
        """Take an update of the engine, on the event loop."""
        for order in update.pushes:
            self._announce(order)
        events: list[_Event] = [*update.scored, *update.sampled, *update.done, *update.failed]
        for event in events:
            if event.call in self._events:
                self._events[event.call].put_nowait(event)
        for ended in update.ended:
            ended.link.end(ended.meta, ended.aborted)

    def _announce(self, order: Push) -> None:
        """Announce now, in the order of the updates; report from a task when the payload has landed."""
        try:
            landed = order.link.push(order.slot, order.num_bytes, order.meta)
        except LinkDown as error:
            self._submit(PushEnded(order.call, error))
            return
        task = asyncio.create_task(self._report(order.call, landed))
        self._pushes.add(task)
        task.add_done_callback(self._pushes.discard)

    async def _report(self, call: int, landed: Awaitable[bool]) -> None:
        problem: PdserveError | None = None
        try:
            if not await landed:  # bounded by the link's own operation timeout
                problem = LegFailed("decode scrapped a payload: the ticket is dead")
        except LinkDown as error:
            problem = error
        self._submit(PushEnded(call, problem))


async def _answer(events: asyncio.Queue[_Event], context: _Context) -> None:
    """Write what the engine says until it is done; ends with the call at the latest."""
    while True:
        match await events.get():
            case Sampled(_, token, computed, cached):
                first = token_to_wire(token)
                sampled = prefill_pb2.Sampled(token=first, computed_tokens=computed, cached_tokens=cached)
                await context.write(prefill_pb2.PrefillResponse(sampled=sampled))
            case PromptScored(_, tokens):
                for start in range(0, len(tokens), SCORES_PER_MESSAGE):
                    scores = map(scored_to_wire, tokens[start : start + SCORES_PER_MESSAGE])
                    message = prefill_pb2.PromptScores(tokens=scores)
                    await context.write(prefill_pb2.PrefillResponse(scores=message))
            case Done(_, kv_bytes, payloads):
                pushed = prefill_pb2.Pushed(kv_bytes=kv_bytes, payloads=payloads)
                await context.write(prefill_pb2.PrefillResponse(pushed=pushed))
                return
            case Failed(_, error):
                raise error
