"""The workers that a router knows to be alive: connected, beating, not stuck.

A worker enters with its first beat and leaves when its stream breaks, when it is silent for too long, when its engine
does not move for `stuck_after_s`, or when it is no longer a member. All that runs on it then fails with `WorkerLost`.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import grpc.aio

from pdserve.errors import WorkerLost, WorkerSilent
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.vitals import SILENCE_LIMIT_S
from router.decode_client import DecodeClient
from router.prefill_client import PrefillClient
from router.rank import Rank
from router.recent import Recent

_log = logging.getLogger(__name__)
CONNECT_LIMIT_S = 5.0
LATE_S = 0.3  # by which our own timer is late when our process, not the worker, was stopped
GRACE_S = 0.05  # a timer may run before the beat that came first
CATCH_UP_S = 0.2  # for beats that came while our process stood still, and one more


@dataclass(eq=False)
class PrefillPeer:
    """A prefill worker that is alive."""

    info: WorkerInfo
    client: PrefillClient
    beat: worker_pb2.WatchResponse
    others: int = 0  # tokens of other routers, at the last beat
    recent: Recent = field(init=False)

    def __post_init__(self) -> None:
        self.recent = Recent(self.beat.work)

    def take(self, beat: worker_pb2.WatchResponse) -> None:
        """Note what the worker says of itself."""
        self.beat = beat
        self.recent.add(beat.work)
        self.others = max(0, beat.load.queued_tokens - self.client.queued.num_tokens)

    @property
    def is_open(self) -> bool:
        """Whether it takes new work."""
        return not self.beat.draining

    @property
    def queued_tokens(self) -> int:
        """What it has to compute: ours as of now, that of other routers as of the last beat."""
        return self.client.queued.num_tokens + self.others

    def tokens_before(self, rank: Rank) -> int:
        """What it computes before a prompt of this rank; of other routers all, whose ranks are not known here."""
        return self.client.queued.tokens_before(rank) + self.others

    def reaches(self, decode: "DecodePeer") -> bool:
        """Whether its link to this incarnation of a decode worker is up."""
        return decode.info.incarnation in self.beat.linked


@dataclass(eq=False)
class DecodePeer:
    """A decode worker that is alive."""

    info: WorkerInfo
    client: DecodeClient
    beat: worker_pb2.WatchResponse
    others: int = 0  # requests of other routers, at the last beat
    recent: Recent = field(init=False)

    def __post_init__(self) -> None:
        self.recent = Recent(self.beat.work)

    def take(self, beat: worker_pb2.WatchResponse) -> None:
        """Note what the worker says of itself."""
        self.beat = beat
        self.recent.add(beat.work)
        self.others = max(0, beat.load.requests - self.client.num_tickets)

    @property
    def is_open(self) -> bool:
        """Whether it takes new work."""
        return not self.beat.draining

    @property
    def num_requests(self) -> int:
        """Requests on it: ours as of now, those of other routers as of the last beat."""
        return self.client.num_tickets + self.others


Peer = PrefillPeer | DecodePeer


def make_peer(info: WorkerInfo, router: str, channel: grpc.aio.Channel, beat: worker_pb2.WatchResponse) -> Peer:
    """The peer of a worker's role, for the router of this name."""
    if info.role == "prefill":
        return PrefillPeer(info, PrefillClient(info.id, channel), beat)
    return DecodePeer(info, DecodeClient(info.id, router, channel), beat)


class Heartbeat:
    """The beats of one worker, each of them in time and in order."""

    def __init__(self, info: WorkerInfo, channel: grpc.aio.Channel, stuck_after_s: float) -> None:
        self._info = info
        self._stuck_after_s = stuck_after_s
        self._call = worker_pb2_grpc.WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest(), wait_for_ready=True)
        self._reading: asyncio.Task[object] | None = None  # cancelling a read would end the call: it is kept
        self._progress = -1
        self._moved_at = 0.0

    async def next(self, limit_s: float = SILENCE_LIMIT_S) -> worker_pb2.WatchResponse:
        """The next beat. Raises WorkerLost when there is none within `limit_s`, or when the engine is stuck."""
        reading = self._reading or asyncio.create_task(self._read())
        self._reading = reading
        loop = asyncio.get_running_loop()
        due = loop.time() + limit_s
        await asyncio.wait({reading}, timeout=limit_s)
        late_s = loop.time() - due
        if not reading.done() and late_s >= LATE_S:
            _log.warning("this router stood still for %.1f s: %s is given time to be heard", late_s, self._info.id)
        if not reading.done():
            await asyncio.wait({reading}, timeout=GRACE_S if late_s < LATE_S else CATCH_UP_S)
        if not reading.done():
            raise WorkerSilent(f"{self._info.id}: no beat for {limit_s:g} s")
        self._reading = None
        try:
            beat = reading.result()
        except grpc.aio.AioRpcError as failure:
            raise WorkerLost(f"{self._info.id}: {failure.details()}") from failure
        if not isinstance(beat, worker_pb2.WatchResponse):
            raise WorkerLost(f"{self._info.id}: it closed the stream")
        self._check(beat)
        return beat

    async def _read(self) -> object:
        return await self._call.read()

    def _check(self, beat: worker_pb2.WatchResponse) -> None:
        if beat.incarnation != self._info.incarnation:
            raise WorkerLost(f"{self._info.id}: replaced by incarnation {beat.incarnation}")
        now = asyncio.get_running_loop().time()
        if beat.progress != self._progress or beat.busy_ms == 0:
            self._progress, self._moved_at = beat.progress, now
        elif now - self._moved_at > self._stuck_after_s:
            raise WorkerLost(f"{self._info.id}: stuck in one layer for {self._stuck_after_s:g} s")

    def close(self) -> None:
        """Stop listening."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
