"""The scope of one gRPC call: errors become statuses, and cleaning up is never cut short.

gRPC cancels a handler when the client goes away, and again while a deadline or a failed write is already unwinding it;
a second cancellation would end the clean-up at its first `await`, and leave pages reserved. So the work of a call runs
in a task of its own, which is cancelled once, and generators are closed out of reach of it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar

import grpc.aio

from pdserve import rpc
from pdserve.errors import Cancelled, DeadlineExceeded, PdserveError

Context = grpc.aio.ServicerContext[Any, Any]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Out:
    """The client's end of a call that streams tokens."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turn = asyncio.Lock()  # gRPC takes one message at a time
        self.delivered: dict[int, int] = {}  # completion tokens that the client has, by choice; none before a delta

    async def write(self, message: Any) -> None:
        """Send a message, and wait until gRPC has taken it. Raises Cancelled when the client is gone."""
        async with self._turn:
            try:
                await self._context.write(message)
            except grpc.aio.InternalError as error:
                raise Cancelled("the client went away") from error

    async def end(self, error: PdserveError) -> NoReturn:
        """End the call with this error, which says what the client has already."""
        if not self.delivered:
            await rpc.abort(self._context, error)
        await rpc.abort_partial(self._context, error, sum(self.delivered.values()))


@asynccontextmanager
async def reporting(context: Context, label: str) -> AsyncIterator[Out]:
    """The root of every call: an error becomes status and details; an unforeseen one is logged and INTERNAL."""
    out = Out(context)
    try:
        yield out
    except PdserveError as error:
        await out.end(error)
    except Exception:  # root of the call: the client gets INTERNAL, the log the trace
        _log.exception("request %r failed", label)
        await out.end(PdserveError(f"request {label!r}: internal error; the router's log has more"))


async def cancelled_once(context: Context, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, cancelled once at the client's deadline or when the client goes, and wait until it has cleaned up.

    Raises DeadlineExceeded, CancelledError, and what `work` raises.
    """
    task = asyncio.create_task(work)
    scope = asyncio.timeout(context.time_remaining())
    try:
        async with scope:
            await asyncio.shield(task)
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded("the client's deadline passed; allow more time or ask for fewer tokens") from None
    finally:
        task.cancel()
        await _see_out(task)


@asynccontextmanager
async def closing(items: AsyncGenerator[_T, None]) -> AsyncIterator[AsyncGenerator[_T, None]]:
    """Close the generator at the end of the block, to the end, even while this task is being cancelled."""
    try:
        yield items
    finally:
        close = asyncio.create_task(_aclose(items))
        try:
            await asyncio.shield(close)
        finally:
            await _see_out(close)


async def _aclose(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


async def _see_out(task: asyncio.Task[None]) -> None:
    """Wait until `task` has ended, however often the caller is cancelled meanwhile."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
