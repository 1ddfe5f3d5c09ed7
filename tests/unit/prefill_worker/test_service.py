"""What a router and a decode worker say reaches the engine; what names no ticket does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from pdserve.handover import PageRun
from pdserve.internal.v1 import prefill_pb2
from pdserve.request import Incarnation, Sampling, WorkRequest
from pdserve.wire import request_to_wire
from prefill_worker.commands import Abort, Cancel, Command, Start
from prefill_worker.service import PrefillServicer

INCARNATION = Incarnation("inc")


class Links:
    """Only aborts."""

    async def aborts(self) -> AsyncIterator[tuple[Incarnation, bytes, str]]:
        yield INCARNATION, b"nonsense", "lost its mind"
        yield INCARNATION, PageRun(7, 2, 1, 0, 3).pack(), "the ticket is dead"


async def test_aborts_become_commands() -> None:
    commands: list[Command] = []
    async with asyncio.timeout(5):
        await PrefillServicer(commands.append, Links()).watch_aborts()  # type: ignore[arg-type]
    assert commands == [Abort(INCARNATION, 7, "the ticket is dead")]


async def test_a_call_becomes_a_command_with_its_priority() -> None:
    commands: list[Command] = []
    work = WorkRequest("label", (1, 2, 3), 3, Sampling(), max_tokens=1)
    message = prefill_pb2.PrefillRequest(request=request_to_wire(work), priority=-2)
    servicer = PrefillServicer(commands.append, Links())  # type: ignore[arg-type]
    call = asyncio.ensure_future(servicer.Prefill(message, None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    assert commands == [Start(0, work, priority=-2), Cancel(0)]
