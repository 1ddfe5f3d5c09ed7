"""Several processes, one at a time: whoever holds the lock on a file has its turn, the others wait, all prepared.

The kernel passes the turn on in the moment its holder ends, however it ends. Nobody has to notice first.
"""

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def turn(path: Path) -> AsyncIterator[None]:
    """Wait for the turn, and hold it for the block. No deadline: a spare waits for as long as it is not needed."""
    with path.open() as file:
        await asyncio.to_thread(
            fcntl.flock, file, fcntl.LOCK_EX
        )  # ends with the process, whose signals are still deadly
        yield
