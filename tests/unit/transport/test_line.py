"""The one way from up to down, and what is lost afterwards."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future

import pytest
import torch

from pdserve.errors import LinkDown, ProtocolError
from transport.line import Line, Outbox


class Wire:
    """Does nothing by itself."""

    def __init__(self) -> None:
        self.up: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.reasons: list[str] = []

    def post(self, payload: torch.Tensor) -> Future[None]:
        raise AssertionError

    def fail(self, why: str) -> None:
        self.reasons.append(why)


def make_line() -> tuple[Line[str], Outbox[str], Wire]:
    wire, outbox = Wire(), Outbox[str]()
    return Line(wire, outbox), outbox, wire


async def test_a_wire_that_does_not_come_up_is_waited_for_three_steps_long() -> None:
    line, _, wire = make_line()
    async with asyncio.timeout(2):
        with pytest.raises(LinkDown, match=r"not up after 0\.03 s"):
            await line.connected(0.01)
    wire = Wire()
    line = Line(wire, Outbox())
    asyncio.get_running_loop().call_later(0.2, wire.up.set_result, None)
    await line.connected(0.1)


async def test_the_first_reason_is_everybodys_and_nothing_is_said_after_it() -> None:
    line, outbox, wire = make_line()
    line.say("a")
    line.fail("cut")
    line.fail("cut again")
    line.say("b")
    assert (line.is_up, line.down.result(), wire.reasons) == (False, "cut", ["cut"])
    assert [frame async for frame in outbox] == ["a"]


async def test_what_the_wire_is_through_with_goes_on_in_the_loop() -> None:
    line, _, _ = make_line()
    went_on: list[int] = []
    futures = [Future[None]() for _ in range(3)]
    for number, future in enumerate(futures):
        line.when_done(future, lambda number=number: went_on.append(number))  # type: ignore[misc]
    thread = threading.Thread(target=futures[1].set_result, args=(None,))
    thread.start()
    thread.join()
    assert went_on == []
    await asyncio.sleep(0.01)
    assert went_on == [1]
    futures[0].set_exception(LinkDown("lost on the way"))
    futures[2].set_result(None)
    await asyncio.sleep(0.01)
    assert (went_on, line.down.result()) == ([1], "lost on the way")


async def test_nothing_is_called_on_a_line_that_is_down_or_a_loop_that_is_closed() -> None:
    line, _, _ = make_line()
    called: list[int] = []
    line.fail("cut")
    line.call(lambda: called.append(1))
    await asyncio.sleep(0.01)
    assert called == []

    async def make() -> Line[str]:
        return make_line()[0]

    left = await asyncio.to_thread(asyncio.run, make())
    left.call(lambda: called.append(2))
    assert called == []


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "the peer closed the link"),
        (ProtocolError("out of turn"), "out of turn"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
async def test_frames_are_taken_until_the_peer_or_its_mistake_ends_the_line(error: Exception | None, why: str) -> None:
    line, _, _ = make_line()
    taken: list[int] = []

    async def frames() -> AsyncIterator[int]:
        yield 1
        yield 2
        if error:
            raise error

    async with line.listening(frames(), taken.append):
        assert await line.down == why
    assert taken == [1, 2]


async def test_a_line_that_is_down_listens_no_more() -> None:
    line, _, _ = make_line()
    queue: asyncio.Queue[int] = asyncio.Queue()
    taken: list[int] = []

    async def frames() -> AsyncIterator[int]:
        while True:
            yield await queue.get()

    async with line.listening(frames(), taken.append):
        queue.put_nowait(1)
        await asyncio.sleep(0.01)
        line.fail("cut")
        queue.put_nowait(2)
        await asyncio.sleep(0.01)
        assert taken == [1]
        assert line.is_up is False
    line, _, _ = make_line()
    async with line.listening(frames(), taken.append):
        assert line.is_up
    assert line.down.result() == "the control stream was closed at this end"
