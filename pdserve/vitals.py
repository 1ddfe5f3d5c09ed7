"""The heartbeat of a worker: what it says of itself every 150 ms, and the part of WorkerService that says it.

The engine's thread bumps `progress` per layer; the asyncio side sends the beat. A router that hears none for most
of a second, or sees a frozen counter in a long step, declares the worker dead.
"""

import asyncio
from dataclasses import asdict, dataclass, field
from typing import Protocol

import grpc.aio

from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.request import Incarnation
from pdserve.speed import Limits, Work
from pdserve.v1 import cluster_pb2

BEAT_INTERVAL_S = 0.15
SILENCE_LIMIT_S = 0.8  # counted from the last beat: with the time to notice it, dead within a second


@dataclass(frozen=True)
class Vitals:
    """One beat."""

    progress: int  # layers computed so far
    busy_s: float  # how long the engine has been in its present step; 0 when idle
    requests: int
    queued_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_in_use: int
    pages_promised: int
    linked: tuple[Incarnation, ...] = ()  # decode workers that a prefill worker reaches
    draining: bool = False  # takes no new work and is about to leave
    work: Work = field(default_factory=Work)  # since it started
    limits: Limits | None = None  # of its machine, where they were measured


class VitalsSource(Protocol):
    """Whoever can say how the worker does, from the event loop."""

    def vitals(self) -> Vitals:
        """The state at this moment."""
        ...


_Context = grpc.aio.ServicerContext[worker_pb2.WatchRequest, worker_pb2.WatchResponse]


class WatchServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Sends beats to every router that watches; `cluster.worker_service` adds the commands of the service."""

    def __init__(self, incarnation: Incarnation, source: VitalsSource) -> None:
        self._incarnation = incarnation
        self._source = source

    async def Watch(  # type: ignore[override]  # noqa: N802
        self,
        _: worker_pb2.WatchRequest,
        context: _Context,
    ) -> None:
        """Beat until the router hangs up."""
        while True:
            await context.write(beat_to_wire(self._incarnation, self._source.vitals()))
            await asyncio.sleep(BEAT_INTERVAL_S)  # the interval is the contract, not a poll


def beat_to_wire(incarnation: Incarnation, vitals: Vitals) -> worker_pb2.WatchResponse:
    """A beat as a message."""
    return worker_pb2.WatchResponse(
        incarnation=incarnation,
        progress=vitals.progress,
        busy_ms=round(vitals.busy_s * 1000),
        load=cluster_pb2.Load(requests=vitals.requests, queued_tokens=vitals.queued_tokens),
        pages=cluster_pb2.Pages(
            total=vitals.pages_total,
            free=vitals.pages_free,
            cached=vitals.pages_cached,
            in_use=vitals.pages_in_use,
            promised=vitals.pages_promised,
        ),
        linked=vitals.linked,
        draining=vitals.draining,
        work=cluster_pb2.Work(**asdict(vitals.work)),
        limits=cluster_pb2.Limits(**asdict(vitals.limits)) if vitals.limits else None,
    )
