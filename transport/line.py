"""What both ends of a link have: frames to say, the state up or down, and the one way from up to down.

`Line.fail` ends everything of a link at once, and only once: the first reason is the one that all waiters get. It is
called when the control stream breaks, when an operation on the wire fails, and when the peer breaks the protocol.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from pdserve.errors import LinkDown, PdserveError
from transport.seams import Wire

Said = TypeVar("Said")
Heard = TypeVar("Heard")


class Outbox(Generic[Said]):
    """What one end says, in order. Bounded by the protocol: outstanding payloads, and one frame per end of a ticket."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[Said | None] = asyncio.Queue()

    def put(self, frame: Said) -> None:
        """Say it after all others."""
        self._frames.put_nowait(frame)

    def close(self) -> None:
        """Nothing more will be said."""
        self._frames.put_nowait(None)

    def __aiter__(self) -> "Outbox[Said]":
        return self

    async def __anext__(self) -> Said:
        if (frame := await self._frames.get()) is None:
            raise StopAsyncIteration
        return frame


class Line(Generic[Said]):
    """Belongs to the event loop's thread, but for `is_up` and `call`."""

    def __init__(self, wire: Wire, outbox: Outbox[Said]) -> None:
        self.wire = wire
        self.is_up = True
        self._loop = asyncio.get_running_loop()
        self.down: asyncio.Future[str] = self._loop.create_future()  # why
        self._outbox = outbox

    async def connected(self, step_timeout_s: float) -> None:
        """Wait until the wire is up: it meets at the store, then each end reaches the other. Raises LinkDown."""
        try:
            async with asyncio.timeout(3 * step_timeout_s):
                await asyncio.wrap_future(self.wire.up)
        except TimeoutError:
            raise LinkDown(f"the wire is not up after {3 * step_timeout_s:g} s") from None

    def say(self, frame: Said) -> None:
        """Put a frame on the control stream; lost when the line is down."""
        if self.is_up:
            self._outbox.put(frame)

    def fail(self, why: str) -> None:
        """Up to down."""
        if self.is_up:
            self.is_up = False
            self.wire.fail(why)
            self._outbox.close()
            self.down.set_result(why)

    def call(self, function: Callable[[], None]) -> None:
        """Run on the loop; from any thread."""
        if self.is_up and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def when_done(self, done: Future[None], then: Callable[[], None]) -> None:
        """Go on, on the loop, when the wire is through with a payload; the line fails if it was not delivered."""

        def look() -> None:
            if error := done.exception():
                self.fail(str(error))
            elif self.is_up:
                then()

        done.add_done_callback(lambda _: self.call(look))

    @asynccontextmanager
    async def listening(self, frames: AsyncIterator[Heard], take: Callable[[Heard], None]) -> AsyncIterator[None]:
        """Meanwhile bring the peer's frames to `take`; down afterwards."""
        listener = asyncio.create_task(self._listen(frames, take))
        try:
            yield
        finally:
            self.fail("the control stream was closed at this end")
            listener.cancel()
            await asyncio.wait({listener})

    async def _listen(self, frames: AsyncIterator[Heard], take: Callable[[Heard], None]) -> None:
        """The root of a task."""
        try:
            async for frame in frames:
                if not self.is_up:
                    return
                take(frame)
            self.fail("the peer closed the link")
        except PdserveError as error:
            self.fail(str(error))
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
