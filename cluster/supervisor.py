"""A child process that is started again whenever it ends: the router, beside Ray.

Its life: started, tethered to this process -> ended -> started again after a while -> `drain`: asked to end, given
time to finish what runs, killed when it takes longer.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.patience import Patience
from cluster.tether import last_line, tethered

log = logging.getLogger(__name__)


class Supervisor:
    """Keeps one command running; use it from the main thread's loop."""

    def __init__(self, name: str, command: Sequence[str], log_path: Path, patience: Patience) -> None:
        self._name = name
        self._command = tethered(command)
        self._log_path = log_path
        self._patience = patience
        self._process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        """Run the command again and again until `drain`. Raises Unavailable when its start is hopeless."""
        while True:
            began = time.monotonic()
            self._process = await self._spawn()
            code = await self._process.wait()
            reason = f"exit code {code}: {last_line(self._log_path)}"
            wait_s = self._patience.wait_s(time.monotonic() - began, reason)
            log.warning("%s ended with %s; again in %.1f s", self._name, reason, wait_s)
            await asyncio.sleep(wait_s)

    async def drain(self, limit_s: float) -> None:
        """Ask the process to end and wait so long; kill it when that does not help. Cancel `keep` first."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not end within %.0f s", self._name, limit_s)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it now."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self._log_path.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in a terminal is for `up` alone. Not a session of its own: Linux shares out CPU time among
                # sessions first, and on a busy CPU the router's threads then waited for up to a second
                process_group=0,
            )
