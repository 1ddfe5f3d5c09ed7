"""A router's side of a prefill worker: one call per request.

Leaving `prefill` cancels the call, and with it all that the worker does for it. When the worker is lost, every open
call fails at once with `WorkerLost`, whatever gRPC still believes.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc.aio

from pdserve import rpc
from pdserve.errors import PdserveError, Unavailable, WorkerLost
from pdserve.internal.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.request import Token, WorkerId, WorkRequest
from pdserve.wire import request_to_wire, ticket_to_wire, token_from_wire
from router.decode_client import HeldTicket


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
    num_payloads: int


_Item = Sampled | Pushed | PdserveError | None


class PrefillClient:
    """Calls to one incarnation of a prefill worker."""

    def __init__(self, worker: WorkerId, channel: grpc.aio.Channel) -> None:
        self._worker = worker
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._open: set[asyncio.Queue[_Item]] = set()
        self._lost: PdserveError | None = None
        self.queued_tokens = 0  # of calls that have not sampled yet

    async def prefill(self, request: WorkRequest, ticket: HeldTicket | None) -> AsyncGenerator[Sampled | Pushed, None]:
        """Yield `Sampled`, then `Pushed`. Raises PdserveError: its own, or what ended the ticket."""
        if self._lost is not None:
            raise self._lost
        items: asyncio.Queue[_Item] = asyncio.Queue()
        message = prefill_pb2.PrefillRequest(request=request_to_wire(request))
        if ticket is not None:
            message.ticket.CopyFrom(ticket_to_wire(ticket.ticket))
            ticket.failed.add_done_callback(
                lambda failed: items.put_nowait(None if failed.cancelled() else failed.result())
            )
        self._open.add(items)
        pump = asyncio.create_task(self._pump(message, items))
        try:
            while (item := await items.get()) is not None:  # ends with the call, at the latest with the worker
                if isinstance(item, PdserveError):
                    raise item
                yield item
        finally:
            self._open.discard(items)
            pump.cancel()

    async def _pump(self, message: prefill_pb2.PrefillRequest, items: asyncio.Queue[_Item]) -> None:
        try:
            async for response in self._stub.Prefill(message):
                items.put_nowait(_event(response))
        except grpc.aio.AioRpcError as failure:
            items.put_nowait(self._error(failure))
        except Exception as error:  # root of the task: a closed channel raises what it likes
            items.put_nowait(WorkerLost(f"{self._worker}: {error}"))
        else:
            items.put_nowait(None)

    def _error(self, failure: grpc.aio.AioRpcError) -> PdserveError:
        error = rpc.error_of(failure)
        if type(error) is not Unavailable:
            return error
        return WorkerLost(f"the worker was lost, send the request again ({self._worker}: {error})")

    def fail(self, error: PdserveError) -> None:
        """End every open call, and refuse new ones, with `error`."""
        self._lost = error
        for items in self._open:
            items.put_nowait(error)


def _event(response: prefill_pb2.PrefillResponse) -> Sampled | Pushed:
    if response.HasField("sampled"):
        sampled = response.sampled
        return Sampled(token_from_wire(sampled.token), sampled.computed_tokens, sampled.cached_tokens)
    return Pushed(response.pushed.kv_bytes, response.pushed.payloads)
