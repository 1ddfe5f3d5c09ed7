"""What decode takes back reaches the engine; what names no ticket does not."""

import asyncio
from collections.abc import AsyncIterator

from pdserve.handover import PageRun
from pdserve.request import Incarnation
from prefill_worker.commands import Abort, Command
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
