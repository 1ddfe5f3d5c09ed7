"""Harm on demand, to this worker: what `pdserve chaos` does, in a cluster that was started with --chaos.

kill        SIGKILL of this process, once the answer is out
stop        SIGSTOP for a time; `cluster/pause.py`, a process beside this one, wakes it up again
cut, slow   faults of its links
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

from pdserve.errors import InvalidRequest
from pdserve.v1 import cluster_pb2 as pb

ANSWER_S = 0.1  # for the answer to get out first
MAX_S = 600.0
PAUSE = Path(__file__).with_name("pause.py")


class Links(Protocol):
    """What both kinds of links can suffer."""

    def cut(self) -> int:
        """Break every link; says how many."""
        ...


class PacedLinks(Protocol):
    """What links that send can suffer beside that."""

    def slow(self, bytes_per_s: float, for_s: float) -> None:
        """Let payloads take as long as at this rate."""
        ...


class Chaos:
    """The harm that one worker can do itself."""

    def __init__(self, enabled: bool, links: Links, paced: PacedLinks | None = None) -> None:
        self._enabled = enabled
        self._links = links
        self._paced = paced

    async def inflict(self, chaos: pb.Chaos) -> None:
        """Do it, or raise InvalidRequest."""
        if not self._enabled:
            raise InvalidRequest("chaos", "refused: the cluster was not started with --chaos")
        match chaos.WhichOneof("harm"):
            case "kill" if chaos.kill:
                asyncio.get_running_loop().call_later(ANSWER_S, os.kill, os.getpid(), signal.SIGKILL)
            case "stop_s":
                await _pause(_checked("stop_s", chaos.stop_s))
            case "cut" if chaos.cut:
                self._links.cut()
            case "slow":
                self._slow(chaos.slow)
            case _:
                raise InvalidRequest("chaos", "is not set; send kill, stop_s, cut or slow; kill and cut are true")

    def _slow(self, slow: pb.Slow) -> None:
        if self._paced is None:
            raise InvalidRequest("chaos.slow", "only prefill workers send payloads; name one of them")
        self._paced.slow(slow.bytes_per_s, _checked("slow.for_s", slow.for_s))


def _checked(field: str, seconds: float) -> float:
    if not 0 < seconds <= MAX_S:  # also refuses NaN
        raise InvalidRequest(f"chaos.{field}", f"must be in (0, {MAX_S:g}] seconds")
    return seconds


async def _pause(for_s: float) -> None:
    command = (sys.executable, "-S", "-E", "-P", str(PAUSE), str(os.getpid()), str(ANSWER_S), str(for_s))
    await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
