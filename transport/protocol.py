"""The rules of one link, as two plain state machines: what prefill and decode may say to each other, and when.

The life of a payload, numbered by `seq` in the order of its announcement:

    prefill (SendEnd)                                     decode (ReceiveEnd)
    announce   --- Announce{seq, num_bytes, meta} --->    announced     size and count checked before anything is posted
    ready      <-- Ready{seq, scrap} -----------------    ready         the receive is posted: a slot, or scratch memory
    (the payload travels over the wire)
    landed     <-- Landed{seq} -----------------------    landed        the slot may be filled again

At most `num_slots` payloads are between Announce and Landed. Decode may answer announcements in any order; the order
of the Readys is the order of the payloads on the wire, and so the order of the Landeds. What is announced is always
sent: there is no taking back. Everything else is a ProtocolError, which ends the link and never the process.

No torch, no grpc, no threads, no clock: the ends are driven by `send` and `receive`.
"""

from collections import deque
from dataclasses import dataclass

from pdserve.errors import ProtocolError


@dataclass(frozen=True)
class Hello:
    """Prefill opens a link; the first frame of a control stream."""

    epoch: str  # fresh per attempt: prefix of the keys in the rendezvous store
    worker: str
    incarnation: str
    card: str  # ModelCard as JSON
    backend: str
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True)
class Announce:
    """Prefill will send `num_bytes` as soon as decode is ready."""

    seq: int
    num_bytes: int
    meta: bytes  # the workers' own


@dataclass(frozen=True)
class End:
    """Prefill announces nothing more of `meta`; `aborted` says why it gave up, empty: it is complete."""

    meta: bytes
    aborted: str


@dataclass(frozen=True)
class Welcome:
    """Decode accepts the link: its rendezvous store is at `host`:`port`."""

    host: str
    port: int
    incarnation: str


@dataclass(frozen=True)
class Ready:
    """The receive is posted: send now. `scrap` says why the payload goes to scratch memory; empty: to a slot."""

    seq: int
    scrap: str


@dataclass(frozen=True)
class Landed:
    """The payload is there."""

    seq: int


@dataclass(frozen=True)
class Abort:
    """Decode wants nothing more of `meta`."""

    meta: bytes
    reason: str


PrefillFrame = Hello | Announce | End
DecodeFrame = Welcome | Ready | Landed | Abort


@dataclass(frozen=True)
class Limits:
    """What both ends agreed on in Hello."""

    slot_bytes: int
    num_slots: int

    def check(self, num_bytes: int, outstanding: int) -> None:
        """Raises ProtocolError when one more payload of `num_bytes` may not be announced."""
        if not 0 < num_bytes <= self.slot_bytes:
            raise ProtocolError(f"a payload of {num_bytes} bytes does not fit: 1 to {self.slot_bytes} are allowed")
        if outstanding >= self.num_slots:
            raise ProtocolError(f"{outstanding} payloads are outstanding, {self.num_slots} are allowed")


class SendEnd:
    """Prefill's end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._next_seq = 0
        self._announced: set[int] = set()
        self._sending: deque[Ready] = deque()  # in wire order

    def announce(self, num_bytes: int, meta: bytes) -> Announce:
        """The frame that announces the next payload."""
        self._limits.check(num_bytes, len(self._announced) + len(self._sending))
        frame = Announce(self._next_seq, num_bytes, meta)
        self._announced.add(frame.seq)
        self._next_seq += 1
        return frame

    def ready(self, frame: Ready) -> None:
        """Decode is ready: the caller sends the payload now."""
        if frame.seq not in self._announced:
            raise ProtocolError(f"ready for payload {frame.seq}, which is not announced or was ready before")
        self._announced.remove(frame.seq)
        self._sending.append(frame)

    def landed(self, frame: Landed) -> bool:
        """Decode has the payload; returns whether it kept it."""
        if not self._sending or self._sending[0].seq != frame.seq:
            raise ProtocolError(f"payload {frame.seq} landed out of turn")
        return not self._sending.popleft().scrap


class ReceiveEnd:
    """Decode's end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._next_seq = 0
        self._announced: set[int] = set()
        self._receiving: deque[int] = deque()  # in wire order

    def announced(self, frame: Announce) -> None:
        """Prefill announced a payload: the caller decides and answers with `ready`."""
        if frame.seq != self._next_seq:
            raise ProtocolError(f"payload {frame.seq} was announced, expected {self._next_seq}")
        self._limits.check(frame.num_bytes, len(self._announced) + len(self._receiving))
        self._announced.add(frame.seq)
        self._next_seq += 1

    def ready(self, seq: int, scrap: str) -> Ready:
        """The frame that calls for payload `seq`; the receive must have been posted."""
        if seq not in self._announced:
            raise ProtocolError(f"payload {seq} is not announced or was decided before")
        self._announced.remove(seq)
        self._receiving.append(seq)
        return Ready(seq, scrap)

    def landed(self, seq: int) -> Landed:
        """The frame that says that `seq` is there."""
        if not self._receiving or self._receiving[0] != seq:
            raise ProtocolError(f"payload {seq} landed out of turn")
        self._receiving.popleft()
        return Landed(seq)
