"""What can befall a cluster, prepared so that it takes no time when its moment has come.

A fault's life: made while requests are being sent (process ids are looked up) -> `strike` returns when it was done ->
the router notices, or nobody needs to -> `end` puts right what does not come back by itself.

Kills and stops are signals, not `pdserve chaos`: that one waits for its answer to get out first.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.v1 import cluster_pb2 as pb
from tests.chaos.table.cells import (
    DECODE_KILLED,
    DECODE_STOPPED,
    GCS_GONE,
    LINK_CUT,
    PREFILL_KILLED,
    PREFILL_STOPPED,
    REDIS_GONE,
    ROUTER_KILLED,
    Victim,
)
from tests.chaos.table.eye import POLL_S, Eye, Look
from tests.e2e.harness import Cluster, child, serving_router

DETECT_LIMIT_S = 10.0
STOP_S = 1.8  # longer than a router waits for a beat: the worker comes back to a cluster that has given it up


class Fault(Protocol):
    """One fault, ready to happen."""

    worker: str  # that it befalls; "": none
    is_silencing: bool  # the worker cannot be told anything until the end

    async def strike(self) -> float:
        """Let it happen; the time.monotonic of just before."""
        ...

    async def noticed(self, eye: Eye, at: float, look: Look) -> float | None:
        """Seconds from `at` until consequences were drawn, None where nobody needs to; `look` was just before."""
        ...

    async def end(self) -> None:
        """Let the worker go on."""
        ...


@dataclass
class Signalled:
    """A process gets a signal."""

    pid: int
    number: signal.Signals
    worker: str = ""
    incarnation: str = ""
    is_silencing: bool = True

    async def strike(self) -> float:
        at = time.monotonic()
        os.kill(self.pid, self.number)
        return at

    async def noticed(self, eye: Eye, at: float, look: Look) -> float | None:
        """Until the router's table lacks the worker."""
        if not self.worker:
            return None
        return await eye.seen_after(
            at, DETECT_LIMIT_S, lambda status: all(each.incarnation != self.incarnation for each in status.workers)
        )

    async def end(self) -> None:
        if self.number is signal.SIGSTOP:
            os.kill(self.pid, signal.SIGCONT)


@dataclass
class Cut:
    """All links of a prefill worker break."""

    eye: Eye
    worker: str
    is_silencing: bool = False

    async def strike(self) -> float:
        at = time.monotonic()
        await self.eye.inflict([self.worker], pb.Chaos(cut=True))
        return at

    async def noticed(self, eye: Eye, at: float, look: Look) -> float | None:
        """Until all calls that pushed over the links have ended: links are back before the router's table tells."""
        calls = self._calls(look)
        while calls and time.monotonic() < at + DETECT_LIMIT_S:
            calls &= self._calls(await eye.look())
            if not calls:
                return time.monotonic() - at
            await asyncio.sleep(POLL_S)
        return float("inf") if calls else None

    def _calls(self, look: Look) -> set[int]:
        entries = (place.prefill for place in look.places.values() if place.prefill)
        return {entry.said.number for entry in entries if entry.worker == self.worker and entry.said.ticket}

    async def end(self) -> None:
        pass


Make = Callable[[Cluster, Eye, str], Fault]


def _signalled(number: signal.Signals) -> Make:
    def make(_: Cluster, eye: Eye, worker: str) -> Fault:
        status = eye.workers[worker]
        return Signalled(status.pid, number, worker, status.incarnation)

    return make


def _killed_child(pattern: str) -> Make:
    def make(cluster: Cluster, _: Eye, worker: str) -> Fault:
        return Signalled(child(cluster.session, pattern).pid, signal.SIGKILL, worker)

    return make


def _killed_router(cluster: Cluster, _: Eye, worker: str) -> Fault:
    return Signalled(serving_router(cluster.session, cluster.address).pid, signal.SIGKILL, worker)


def _cut(_: Cluster, eye: Eye, worker: str) -> Fault:
    return Cut(eye, worker)


_MAKES: dict[Victim, Make] = {
    PREFILL_KILLED: _signalled(signal.SIGKILL),
    DECODE_KILLED: _signalled(signal.SIGKILL),
    PREFILL_STOPPED: _signalled(signal.SIGSTOP),
    DECODE_STOPPED: _signalled(signal.SIGSTOP),
    LINK_CUT: _cut,
    REDIS_GONE: _killed_child("unixsocket"),
    GCS_GONE: _killed_child("gcs_server"),
    ROUTER_KILLED: _killed_router,
}


def faults(victim: Victim, cluster: Cluster, eye: Eye) -> list[Fault]:
    """One for each worker that it could befall, or the one that befalls none."""
    workers = eye.of_role(victim.role) if victim.role else [""]
    return [_MAKES[victim](cluster, eye, worker) for worker in workers]
