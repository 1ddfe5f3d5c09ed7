"""Waiting for the end of a process that somebody else may reap."""

import asyncio
import os


async def process_end(pid: int) -> None:
    """Return when the process has ended, or is not there at all."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
