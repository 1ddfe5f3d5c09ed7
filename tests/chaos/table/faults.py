"""What can befall a cluster, prepared so that it takes no time when its moment has come.

A fault's life: made while requests are being sent (process ids are looked up) -> `strike` returns when it was done ->
the router notices, or nobody needs to -> `end` puts right what does not come back by itself.

Kills and stops are signals, not `pdserve chaos`: that one waits for its answer to get out first.
"""

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
from tests.chaos.table.eye import Eye
from tests.e2e.harness import Cluster, child

STOP_S = 1.8  # longer than a router waits for a beat: the worker comes back to a cluster that has given it up


class Fault(Protocol):
    """One fault, ready to happen."""

    worker: str  # that it befalls; "": none

    async def strike(self) -> float:
        """Let it happen; the time.monotonic of just before."""
        ...

    def is_noticed(self, status: pb.GetStatusResponse) -> bool:
        """Whether the router has drawn the consequence."""
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

    async def strike(self) -> float:
        at = time.monotonic()
        os.kill(self.pid, self.number)
        return at

    def is_noticed(self, status: pb.GetStatusResponse) -> bool:
        return all(worker.incarnation != self.incarnation for worker in status.workers)

    async def end(self) -> None:
        if self.number is signal.SIGSTOP:
            os.kill(self.pid, signal.SIGCONT)


@dataclass
class Cut:
    """All links of a prefill worker break."""

    eye: Eye
    worker: str
    num_linked: int

    async def strike(self) -> float:
        at = time.monotonic()
        await self.eye.inflict([self.worker], pb.Chaos(cut=True))
        return at

    def is_noticed(self, status: pb.GetStatusResponse) -> bool:
        return any(worker.id == self.worker and len(worker.linked) < self.num_linked for worker in status.workers)

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


def _cut(_: Cluster, eye: Eye, worker: str) -> Fault:
    return Cut(eye, worker, len(eye.workers[worker].linked))


_MAKES: dict[Victim, Make] = {
    PREFILL_KILLED: _signalled(signal.SIGKILL),
    DECODE_KILLED: _signalled(signal.SIGKILL),
    PREFILL_STOPPED: _signalled(signal.SIGSTOP),
    DECODE_STOPPED: _signalled(signal.SIGSTOP),
    LINK_CUT: _cut,
    REDIS_GONE: _killed_child("unixsocket"),
    GCS_GONE: _killed_child("gcs_server"),
    ROUTER_KILLED: _killed_child("cluster.node"),
}


def faults(victim: Victim, cluster: Cluster, eye: Eye) -> list[Fault]:
    """One for each worker that it could befall, or the one that befalls none."""
    workers = eye.of_role(victim.role) if victim.role else [""]
    return [_MAKES[victim](cluster, eye, worker) for worker in workers]
