"""The gRPC face of a decode worker: one bidirectional stream per router, and the receiving end of its links.

Commands of a stream are submitted in order. When the stream ends, however it ends, all its tickets end with it. A
ticket that ends before its last page has landed is aborted on the link that its pages come on.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc.aio

from decode_worker.commands import Command, Decode, Ended, GaveUp, Landed, Release, Reserve, StepUpdate, StreamGone
from decode_worker.outbox import Event, Outbox
from pdserve import rpc
from pdserve.errors import LegFailed, LinkDown, ProtocolError
from pdserve.handover import PageRun
from pdserve.internal.v1 import decode_pb2, decode_pb2_grpc
from pdserve.wire import request_from_wire, ticket_from_wire, token_from_wire
from transport.base import Offer, ReceiveLinks

_Context = grpc.aio.ServicerContext[decode_pb2.ConnectRequest, decode_pb2.ConnectResponse]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Turns a router's stream into commands, and the engine's updates into messages."""

    def __init__(self, submit: Callable[[Command], None], receiver: "Receiver") -> None:
        self._submit = submit
        self._receiver = receiver
        self._numbers = itertools.count()
        self._outboxes: dict[int, Outbox] = {}

    # A coroutine that writes, not an async generator: gRPC would leave a cancelled generator to the garbage collector.
    async def Connect(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.ConnectRequest], context: _Context
    ) -> None:
        """Serve one router; see decode.proto."""
        stream = next(self._numbers)
        router = str(dict(context.invocation_metadata() or ()).get("pdserve-router", ""))
        outbox = self._outboxes[stream] = Outbox()
        writer = asyncio.create_task(_write(outbox, context))
        writer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the reader ends with it
        try:
            async for request in request_iterator:
                self._submit(_command(stream, router, request))
        except ProtocolError as error:
            await rpc.abort(context, error)
        finally:
            writer.cancel()
            del self._outboxes[stream]
            self._submit(StreamGone(stream))

    def deliver(self, update: StepUpdate) -> None:
        """Take an update of the engine, on the event loop."""
        events: list[Event] = [*update.reserved, *update.emitted, *update.failed]
        for event in events:
            if event.stream in self._outboxes:
                self._outboxes[event.stream].add(event)
        for ended in update.ended:
            self._receiver.end(ended)


async def _write(outbox: Outbox, context: _Context) -> None:
    """One message is outstanding; what accrues meanwhile merges into the next."""
    while True:
        await context.write(await outbox.take())


def _command(stream: int, router: str, request: decode_pb2.ConnectRequest) -> Command:
    match request.WhichOneof("command"):
        case "reserve":
            asked = request.reserve
            return Reserve(stream, asked.call, request_from_wire(asked.request), asked.whole, router)
        case "decode":
            return Decode(stream, ticket_from_wire(request.decode.ticket), token_from_wire(request.decode.first))
        case "release":
            return Release(stream, ticket_from_wire(request.release.ticket))
        case _:
            raise ProtocolError("a command of a kind this worker does not know")


class Receiver:
    """Brings what links offer to the engine, and tells prefill what is not wanted any more."""

    def __init__(self, submit: Callable[[Command], None], is_live: Callable[[int], bool], links: ReceiveLinks) -> None:
        self._submit = submit
        self._is_live = is_live
        self._links = links
        self._offers: dict[int, Offer] = {}  # the newest of each live ticket: it knows the link

    async def run(self) -> None:
        """Serve offers and ends until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_ends())
            async for offer in self._links.offers():
                group.create_task(self._receive(offer))

    def end(self, ended: Ended) -> None:
        """The engine is through with a ticket."""
        offer = self._offers.pop(ended.counter, None)
        if offer is not None and ended.aborted:
            offer.abort(ended.aborted)

    async def _receive(self, offer: Offer) -> None:
        try:
            run = PageRun.unpack(offer.meta)
        except ProtocolError as error:
            offer.scrap(str(error))
            return
        if not self._is_live(run.counter):
            offer.scrap("the ticket is dead")
            offer.abort("the ticket is dead")
            return
        self._offers[run.counter] = offer  # before the engine's `Ended`, which is still to come for a live ticket
        offer.land()
        try:
            slot = await offer.landed  # bounded by the link's own operation timeout
        except LinkDown:
            return  # prefill knows it too, and its call tells the router
        if slot is not None:
            self._submit(Landed(run, slot))

    async def _watch_ends(self) -> None:
        async for meta, aborted in self._links.ends():
            with suppress(ProtocolError):  # an end that names no ticket ends none
                counter = PageRun.unpack(meta).counter
                if aborted:
                    self._submit(GaveUp(counter, LegFailed(f"prefill gave up: {aborted}")))
