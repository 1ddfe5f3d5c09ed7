"""The prefill side of links.

A link's life: `connect` starts a task that opens a control stream, says Hello, connects the wire and serves the link
until it is down; then again, with a fresh epoch and a growing delay, until `forget`. A payload's life is in `protocol`.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from pdserve.errors import Incompatible, LinkDown, PdserveError, ProtocolError
from pdserve.membership import WorkerInfo
from pdserve.model_card import difference
from pdserve.plain import to_plain
from pdserve.request import Incarnation, WorkerId
from transport.base import LinkConfig, Own, SendSlot
from transport.line import Line, Outbox
from transport.pace import Lane, Pace
from transport.protocol import Abort, DecodeFrame, End, Hello, Landed, PrefillFrame, Ready, SendEnd, Welcome
from transport.seams import Address, Control, Wires
from transport.slots import Quarantine, SlotPool

RELINK_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

_log = logging.getLogger(__name__)

Aborts = asyncio.Queue[tuple[Incarnation, bytes, str]]


@dataclass
class _Push:
    slot: SendSlot
    num_bytes: int
    landed: asyncio.Future[bool]
    deadline: asyncio.TimerHandle
    is_sent: bool = False  # the wire is through with the slot
    was_kept: bool | None = None  # None: decode has not said yet


class PrefillLink:
    """One link that is up, or was: see base.SendLink."""

    def __init__(
        self,
        incarnation: Incarnation,
        line: Line[PrefillFrame],
        config: LinkConfig,
        pool: SlotPool,
        aborts: Aborts,
        pace: Pace,
    ) -> None:
        self.incarnation = incarnation  # of decode
        self.down = line.down  # why, once it is
        self.fail = line.fail
        self._line = line
        self._end = SendEnd(config.limits)
        self._push_timeout_s = config.push_timeout_s
        self._pool = pool
        self._aborts = aborts
        self._lane = Lane(pace)
        self._pushes: dict[int, _Push] = {}  # by seq
        line.down.add_done_callback(self._lose_all)

    @property
    def is_up(self) -> bool:
        return self._line.is_up

    def try_slot(self) -> SendSlot | None:
        return self._pool.take() if self._line.is_up else None

    def push(self, slot: SendSlot, num_bytes: int, meta: bytes) -> Awaitable[bool]:
        if not self._line.is_up:
            raise LinkDown(self.down.result())
        try:
            frame = self._end.announce(num_bytes, meta)
        except ProtocolError:
            slot.give_back()
            raise
        loop = asyncio.get_running_loop()
        landed: asyncio.Future[bool] = loop.create_future()
        problem = f"a payload has not landed in {self._push_timeout_s:g} s"
        deadline = loop.call_later(self._push_timeout_s, self.fail, problem)
        self._pushes[frame.seq] = _Push(slot, num_bytes, landed, deadline)
        self._line.say(frame)
        return asyncio.shield(landed)

    def end(self, meta: bytes, aborted: str) -> None:
        self._line.say(End(meta, aborted))

    def take(self, frame: DecodeFrame) -> None:
        """Act on what decode says. Raises ProtocolError."""
        match frame:
            case Ready(seq):
                self._end.ready(frame)
                self._send(seq)
            case Landed(seq):
                self._pushes[seq].was_kept = self._end.landed(frame)
                self._settle(seq)
            case Abort(meta, reason):
                self._aborts.put_nowait((self.incarnation, meta, reason))
            case Welcome():
                raise ProtocolError("decode said Welcome twice")

    def _send(self, seq: int) -> None:
        push = self._pushes[seq]

        def sent() -> None:
            push.is_sent = True
            self._settle(seq)

        def post() -> None:
            self._line.when_done(self._line.wire.post(push.slot.buffer[: push.num_bytes]), sent)

        self._lane.run(push.num_bytes, post)

    def _settle(self, seq: int) -> None:
        """A push is through when decode has said so *and* the wire no longer reads the slot."""
        push = self._pushes[seq]
        if push.is_sent and push.was_kept is not None:
            del self._pushes[seq]
            push.deadline.cancel()
            push.slot.give_back()
            push.landed.set_result(push.was_kept)

    def _lose_all(self, down: asyncio.Future[str]) -> None:
        """The slots stay where they are: nobody gets one of a dead link."""
        for push in self._pushes.values():
            push.deadline.cancel()
            push.landed.set_exception(LinkDown(down.result()))
        self._pushes.clear()


class PrefillLinks:
    """All links of one prefill worker: see base.SendLinks. Made on a running event loop."""

    def __init__(self, own: Own, config: LinkConfig, control: Control, wires: Wires) -> None:
        self._own = own
        self._config = config
        self._control = control
        self._wires = wires
        self._quarantine = Quarantine()
        self.fatal = self._quarantine.fatal
        self._aborts = Aborts()
        self._pace = Pace()
        self.slow = self._pace.slow
        self._peers: dict[WorkerId, WorkerInfo] = {}
        self._keepers: dict[WorkerId, asyncio.Task[None]] = {}
        self._links: dict[WorkerId, PrefillLink] = {}  # those that are up
        self._problems: dict[WorkerId, PdserveError] = {}  # why the others are not
        self._changed = asyncio.Event()  # replaced at every change

    def connect(self, peer: WorkerInfo) -> None:
        if self._peers.get(peer.id) == peer:
            return
        self.forget(peer.id)
        self._peers[peer.id] = peer
        if found := difference(self._own.card, peer.card):
            self._refuse(peer, Incompatible(found))
        else:
            self._keepers[peer.id] = asyncio.create_task(self._keep(peer), name=f"link to {peer.id}")

    def forget(self, worker: WorkerId) -> None:
        self._peers.pop(worker, None)
        self._problems.pop(worker, None)
        if link := self._links.pop(worker, None):
            link.fail("the worker left the cluster or was replaced")
        if keeper := self._keepers.pop(worker, None):
            keeper.cancel()

    def link(self, worker: WorkerId, incarnation: Incarnation) -> PrefillLink:
        link = self._links.get(worker)
        if link is None:
            raise self._problems.get(worker, LinkDown(f"there is no link to {worker}"))
        if link.incarnation != incarnation:
            raise LinkDown(f"the link to {worker} is to incarnation {link.incarnation}, not to {incarnation}")
        return link

    def links_up(self) -> dict[WorkerId, Incarnation]:
        return {worker: link.incarnation for worker, link in self._links.items()}

    async def wait_up(self, worker: WorkerId, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while worker not in self._links and not isinstance(self._problems.get(worker), Incompatible):
                    await self._changed.wait()
        except TimeoutError:
            raise self._problems.get(worker, LinkDown(f"no link to {worker} after {timeout_s:g} s")) from None
        if worker not in self._links:
            raise self._problems[worker]

    async def aborts(self) -> AsyncIterator[tuple[Incarnation, bytes, str]]:
        while True:
            yield await self._aborts.get()

    def cut(self) -> int:
        """A fault on demand: fail every link that is up; new ones are made. Returns how many."""
        links = [link for link in self._links.values() if link.is_up]
        for link in links:
            link.fail("cut by chaos")
        return len(links)

    async def close(self) -> None:
        keepers = list(self._keepers.values())
        for worker in list(self._peers):
            self.forget(worker)
        await asyncio.gather(*keepers, return_exceptions=True)
        await self._quarantine.empty()

    async def _keep(self, peer: WorkerInfo) -> None:
        """One link after another. The root of a task."""
        delays = iter(RELINK_DELAYS_S)
        while True:
            try:
                async with self._open(peer) as link:
                    delays = iter(RELINK_DELAYS_S)
                    raise LinkDown(await asyncio.shield(link.down))
            except Incompatible as error:
                return self._refuse(peer, error)
            except PdserveError as error:
                self._note(peer, error)
            except Exception as error:
                return self._quarantine.condemn(f"link to {peer.id}: {type(error).__name__}: {error}")
            await asyncio.sleep(next(delays, RELINK_DELAYS_S[-1]))

    @asynccontextmanager
    async def _open(self, peer: WorkerInfo) -> AsyncIterator[PrefillLink]:
        """A link, from Hello to the end of its wire."""
        hello = self._hello()
        outbox = Outbox[PrefillFrame]()
        outbox.put(hello)
        try:
            async with aclosing(self._control.open(peer, outbox)) as frames:
                store = await self._welcome(peer, frames)
                line = Line(self._wires.make("send", hello.epoch, store), outbox)
                try:
                    await line.connected(self._config.op_timeout_s)
                    link = self._link_up(peer, line)
                    async with line.listening(frames, link.take):
                        yield link
                finally:
                    line.fail("the link was closed at this end")
                    self._quarantine.put(line.wire)
        finally:
            outbox.close()  # lets gRPC's reader of our frames end

    def _link_up(self, peer: WorkerInfo, line: Line[PrefillFrame]) -> PrefillLink:
        pool = SlotPool(self._wires.buffers(self._config.num_slots))
        link = PrefillLink(peer.incarnation, line, self._config, pool, self._aborts, self._pace)
        self._links[peer.id] = link
        self._problems.pop(peer.id, None)
        self._tell()
        line.down.add_done_callback(lambda _: self._link_down(peer.id, link))
        return link

    def _link_down(self, worker: WorkerId, link: PrefillLink) -> None:
        if self._links.get(worker) is link:
            del self._links[worker]

    def _hello(self) -> Hello:
        own, config = self._own, self._config
        card = json.dumps(to_plain(own.card), sort_keys=True)
        epoch = uuid.uuid4().hex
        return Hello(epoch, own.worker, own.incarnation, card, config.backend, config.slot_bytes, config.num_slots)

    async def _welcome(self, peer: WorkerInfo, frames: AsyncIterator[DecodeFrame]) -> Address:
        """Where the wire meets. Raises what decode answered instead."""
        try:
            async with asyncio.timeout(self._config.op_timeout_s):
                welcome = await anext(frames, None)
        except TimeoutError:
            raise LinkDown(f"{peer.id} has not answered in {self._config.op_timeout_s:g} s") from None
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"{peer.id} answered Hello with {type(welcome).__name__}")
        if welcome.incarnation != peer.incarnation:
            raise LinkDown(f"{peer.id} is incarnation {welcome.incarnation} now, not {peer.incarnation}")
        return Address(welcome.host, welcome.port)

    def _refuse(self, peer: WorkerInfo, error: Incompatible) -> None:
        _log.error("no link to %s: %s", peer.id, error)
        self._problems[peer.id] = error
        self._tell()

    def _note(self, peer: WorkerInfo, error: PdserveError) -> None:
        _log.warning("link to %s is down: %s", peer.id, error)
        self._problems[peer.id] = LinkDown(f"link to {peer.id}: {error}")

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
