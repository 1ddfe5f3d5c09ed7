"""A router's side of a decode worker: one bidirectional stream for all its requests.

    reserve ──> ticket ──(prefill pushes)──> adopt(first token) ──> tokens, numbered without a gap
    leaving `reserve`'s block for any reason releases the ticket

`adopt` may come while the last KV still moves: the worker begins as soon as it has both.

When the stream breaks, every open reservation and every token queue fails at once with `WorkerLost`.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from pdserve.errors import PdserveError, ProtocolError, WorkerLost
from pdserve.internal.v1 import decode_pb2, decode_pb2_grpc
from pdserve.request import Ticket, Token, WorkerId, WorkRequest
from pdserve.wire import (
    failure_from_wire,
    request_to_wire,
    ticket_from_wire,
    ticket_to_wire,
    token_from_wire,
    token_to_wire,
)


@dataclass(eq=False)
class HeldTicket:
    """A ticket for as long as its reservation is held."""

    ticket: Ticket
    label: str  # the client's request id
    failed: "asyncio.Future[PdserveError]"  # the worker is lost, or has given the ticket up; cancelled when released
    items: "asyncio.Queue[_Item]"  # what `tokens` reads
    is_decoding: bool = False  # a token came: decode has all the KV
    is_finished: bool = False  # the last token came, though it may not have been read yet

    def fail(self, error: PdserveError) -> None:
        """End it, whoever waits."""
        if not self.failed.done():
            self.failed.set_result(error)
            self.items.put_nowait(error)

    def lose_prefill(self, error: PdserveError) -> None:
        """The prefill leg has ended before its time; no loss once decode has all the KV."""
        if not self.is_decoding:
            self.fail(error)


@dataclass(frozen=True)
class Decoded:
    """One token, and the forward passes in which the request has had a row so far."""

    token: Token
    num_steps: int


_Item = Decoded | PdserveError


class DecodeClient:
    """The stream to one incarnation of a decode worker; `run` must be running."""

    def __init__(self, worker: WorkerId, router: str, channel: grpc.aio.Channel) -> None:
        self._worker = worker
        self._router = router
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._commands: asyncio.Queue[decode_pb2.ConnectRequest | None] = asyncio.Queue()
        self._numbers = itertools.count()
        self._reservations: dict[int, tuple[str, asyncio.Future[HeldTicket]]] = {}  # label and waiter, by call
        self._held: dict[int, HeldTicket] = {}
        self._lost: PdserveError | None = None

    @property
    def num_tickets(self) -> int:
        """Requests of this router on the worker."""
        return len(self._held) + len(self._reservations)

    def held_tickets(self) -> list[tuple[Ticket, str]]:
        """All tickets that the worker must know, with their requests' labels."""
        alive = (held for held in self._held.values() if not (held.is_finished or held.failed.done()))
        return [(held.ticket, held.label) for held in alive]

    async def run(self) -> None:
        """Serve the stream until it breaks. Raises WorkerLost."""
        try:
            async for message in self._stub.Connect(self._requests(), metadata=(("pdserve-router", self._router),)):
                self._take(message)
        except grpc.aio.AioRpcError as failure:
            raise WorkerLost(f"{self._worker}: {failure.details()}") from failure
        raise WorkerLost(f"{self._worker}: it closed the stream")

    async def _requests(self) -> AsyncIterator[decode_pb2.ConnectRequest]:
        while (command := await self._commands.get()) is not None:
            yield command

    def _take(self, message: decode_pb2.ConnectResponse) -> None:
        for reserved in message.reserved:
            self._take_reserved(reserved)
        for batch in message.tokens:
            if held := self._held.get(batch.counter):
                held.is_decoding = True
                for token in batch.tokens:
                    held.items.put_nowait(Decoded(token_from_wire(token), batch.decode_steps))
                    held.is_finished = held.is_finished or token.finish != ""
        for failure in message.failures:
            if held := self._held.get(failure.counter):
                held.fail(failure_from_wire(failure.failure))

    def _take_reserved(self, reserved: decode_pb2.Reserved) -> None:
        label, waiter = self._reservations.pop(reserved.call, ("", None))
        if reserved.HasField("failure"):
            if waiter is not None:
                waiter.set_exception(failure_from_wire(reserved.failure))
            return
        ticket = ticket_from_wire(reserved.ticket)
        if waiter is None:
            self._release(ticket)  # whoever asked has left
            return
        held = HeldTicket(ticket, label, asyncio.get_running_loop().create_future(), asyncio.Queue())
        self._held[ticket.counter] = held
        waiter.set_result(held)

    @asynccontextmanager
    async def reserve(self, request: WorkRequest, *, whole: bool) -> AsyncIterator[HeldTicket]:
        """Hold a ticket for the time of the block; `whole` promises room for all that remains.

        Raises NoCapacity, InvalidRequest, LegFailed.
        """
        held = await self._reserve(request, whole)
        try:
            yield held
        finally:
            self._drop(held)

    async def _reserve(self, request: WorkRequest, whole: bool) -> HeldTicket:
        if self._lost is not None:
            raise self._lost
        call = next(self._numbers)
        waiter: asyncio.Future[HeldTicket] = asyncio.get_running_loop().create_future()
        self._reservations[call] = request.label, waiter
        reserve = decode_pb2.Reserve(call=call, request=request_to_wire(request), whole=whole)
        self._commands.put_nowait(decode_pb2.ConnectRequest(reserve=reserve))
        try:
            return await asyncio.shield(waiter)  # answered by the worker, or failed with it
        except asyncio.CancelledError:
            self._abandon(call, waiter)
            raise

    def _abandon(self, call: int, waiter: asyncio.Future[HeldTicket]) -> None:
        """The caller leaves before, or just as, the reply comes: the ticket must not outlive it."""
        self._reservations.pop(call, None)
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._drop(waiter.result())

    def _drop(self, held: HeldTicket) -> None:
        del self._held[held.ticket.counter]
        held.failed.cancel()
        self._release(held.ticket)

    def _release(self, ticket: Ticket) -> None:
        release = decode_pb2.Release(ticket=ticket_to_wire(ticket))
        self._commands.put_nowait(decode_pb2.ConnectRequest(release=release))

    def adopt(self, held: HeldTicket, first: Token) -> None:
        """Let the worker go on from `first` as soon as it has all the KV."""
        decode = decode_pb2.Decode(ticket=ticket_to_wire(held.ticket), first=token_to_wire(first))
        self._commands.put_nowait(decode_pb2.ConnectRequest(decode=decode))

    async def tokens(self, held: HeldTicket, first: Token) -> AsyncGenerator[Decoded, None]:
        """Yield the tokens after `first`, up to the one that finishes. Raises LegFailed, ProtocolError."""
        token = first
        while not token.finish:
            item = await held.items.get()  # bounded by the worker's liveness and the client's deadline
            if isinstance(item, PdserveError):
                raise item
            if item.token.number != token.number + 1:
                raise ProtocolError(f"{self._worker}: token {item.token.number} came after token {token.number}")
            token = item.token
            yield item

    def fail(self, error: PdserveError) -> None:
        """End everything on this stream with `error`."""
        self._lost = error
        for _, waiter in self._reservations.values():
            waiter.set_exception(error)
        self._reservations.clear()
        for held in self._held.values():
            held.fail(error)
        self._commands.put_nowait(None)  # lets gRPC's reader of the commands end
