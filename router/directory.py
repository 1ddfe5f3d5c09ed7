"""Keeps a router's table of live workers: for each member a task that connects, listens and connects again.

Membership only says where to look; a worker is in the table from its first beat until its stream ends.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

import grpc.aio

from pdserve import rpc
from pdserve.errors import PdserveError, WorkerLost
from pdserve.membership import Membership, WorkerInfo
from pdserve.request import Incarnation
from router.decode_client import DecodeClient
from router.peers import CONNECT_LIMIT_S, DecodePeer, Heartbeat, Peer, PrefillPeer, make_peer

_log = logging.getLogger(__name__)
RECONNECT_DELAY_S = 0.5


class Directory:
    """The live workers; `run` must be running."""

    def __init__(
        self,
        membership: Membership,
        stuck_after_s: float,
        on_change: Callable[[], None],
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
    ) -> None:
        self._membership = membership
        self._connect = connect
        self.router = f"router-{secrets.token_hex(4)}"  # who holds our tickets, in the ledgers of workers
        self._stuck_after_s = stuck_after_s
        self._on_change = on_change
        self._keepers: dict[Incarnation, asyncio.Task[None]] = {}
        self._peers: dict[Incarnation, Peer] = {}
        self._members: tuple[WorkerInfo, ...] = ()
        self._left: set[Incarnation] = set()
        self._served_at = asyncio.get_running_loop().time()

    @property
    def prefills(self) -> list[PrefillPeer]:
        """Live prefill workers."""
        return [peer for peer in self._peers.values() if isinstance(peer, PrefillPeer)]

    @property
    def decodes(self) -> list[DecodePeer]:
        """Live decode workers."""
        return [peer for peer in self._peers.values() if isinstance(peer, DecodePeer)]

    @property
    def is_serving(self) -> bool:
        """Whether some prefill worker reaches some decode worker."""
        return any(prefill.reaches(decode) for prefill in self.prefills for decode in self.decodes)

    @property
    def members(self) -> tuple[WorkerInfo, ...]:
        """All that have not left, lost ones, too."""
        return tuple(info for info in self._members if info.incarnation not in self._left)

    @property
    def silent(self) -> tuple[WorkerInfo, ...]:
        """Members that are not heard now."""
        return tuple(info for info in self.members if info.incarnation not in self._peers)

    def down_for_s(self) -> float:
        """How long no prefill worker has reached a decode worker; 0 while one does."""
        now = asyncio.get_running_loop().time()
        if self.is_serving:
            self._served_at = now
        return now - self._served_at

    def fail_all(self, error: PdserveError) -> None:
        """End everything that runs on any worker."""
        for peer in self._peers.values():
            peer.client.fail(error)

    async def run(self) -> None:
        """Follow the membership until cancelled."""
        try:
            async for view in self._membership.views():
                self._reconcile(view)
        finally:
            for keeper in self._keepers.values():
                keeper.cancel()
            await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    def _reconcile(self, view: tuple[WorkerInfo, ...]) -> None:
        self._members = view
        members = {info.incarnation: info for info in view}
        self._left &= members.keys()
        for incarnation in [gone for gone in self._keepers if gone not in members]:
            self._keepers.pop(incarnation).cancel()
        for incarnation in [new for new in members if new not in self._keepers]:
            self._keepers[incarnation] = asyncio.create_task(self._keep(members[incarnation]))

    async def _keep(self, info: WorkerInfo) -> None:
        while info.incarnation not in self._left:
            try:
                await self._attend(info)
            except Exception:  # root of the task: one worker's trouble must not hide it for ever
                _log.exception("%s", info.id)
            await asyncio.sleep(RECONNECT_DELAY_S)  # back-off: the same incarnation may come back

    async def _attend(self, info: WorkerInfo) -> None:
        """One connection, from the first beat to its end."""
        channel = self._connect(info.address)
        heartbeat = Heartbeat(info, channel, self._stuck_after_s)
        peer: Peer | None = None
        error = WorkerLost(f"{info.id} has left")
        try:
            peer = make_peer(info, self.router, channel, await heartbeat.next(CONNECT_LIMIT_S))
            self._peers[info.incarnation] = peer
            self._on_change()
            await self._listen(peer, heartbeat)
        except WorkerLost as lost:  # before the first beat, it may be an incarnation that is gone and still registered
            _log.warning("%s: %s", "lost" if peer else "not reached", lost)
            error = lost
        finally:
            if peer is not None:
                if _has_drained(peer):  # it went for good, even if the registry was away and did not hear of it
                    self._left.add(info.incarnation)
                del self._peers[info.incarnation]
                peer.client.fail(error)
                self._on_change()
            heartbeat.close()
            await channel.close()

    async def _listen(self, peer: Peer, heartbeat: Heartbeat) -> None:
        stream = asyncio.create_task(_stream_of(peer))
        beats = asyncio.create_task(self._beats(peer, heartbeat))
        try:
            await asyncio.wait((stream, beats), return_when=asyncio.FIRST_COMPLETED)
            for task in (stream, beats):
                if task.done():
                    task.result()
        finally:
            for task in (stream, beats):
                task.cancel()
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the first one counts

    async def _beats(self, peer: Peer, heartbeat: Heartbeat) -> None:
        while True:
            peer.take(await heartbeat.next())
            self.down_for_s()
            self._on_change()


def _has_drained(peer: Peer) -> bool:
    """Whether it held nothing any more and was about to end. One that is lost with work on it is started again."""
    return peer.beat.draining and not peer.beat.load.requests


async def _stream_of(peer: Peer) -> None:
    if isinstance(peer.client, DecodeClient):
        await peer.client.run()
    else:
        await asyncio.get_running_loop().create_future()  # a prefill worker has a call per request instead
