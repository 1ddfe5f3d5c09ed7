"""A twin of torch's ProcessGroupNCCL in memory: two ranks, one direction, and NCCL's rules, for links without GPUs.

* A communicator is a rendezvous. With `blocking=0` the first call that uses it waits, inside, until the peer has made
  its own; nothing ends that wait from outside. (torch gives up after TORCH_NCCL_NONBLOCKING_TIMEOUT: `give_up_s`.)
* Payloads match by the order of the posts alone; tags are ignored. A wrong size never completes, nor what follows it.
* `wait` orders streams and returns at once; only `is_completed` tells completion.
* Nothing may be inside a communicator while it is aborted. Only an abort frees its memory and ends its reads and
  writes of payloads: until then they must be kept.

What breaks a rule is refused where NCCL would crash or hang, and noted in `Fabric.violations`.
"""

import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._C import _distributed_c10d as c10d

from transport.base import LinkConfig
from transport.seams import Side
from transport.torch_dist import Connect, NcclGroup

MEMORY_BYTES = 37 * 2**20  # of one end: four channels


@dataclass
class Passage:
    """What lies between two ends: what each has posted, and how far both have come."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    posted: dict[int, list["TwinWork"]] = field(default_factory=dict)  # by rank
    num_done: int = 0


class Fabric:
    """All passages of one test, its faults, and what was done wrong."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.may_abort = threading.Event()  # cleared: aborts hang, as behind a killed peer's kernel
        self.may_abort.set()
        self.give_up_s: float | None = None  # of a rendezvous
        self.post_s = 0.0  # time inside a post
        self.groups: set[TwinGroup] = set()  # made and not aborted
        self._is_held = False
        self._passages: dict[str, Passage] = {}
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Held by communicators."""
        return sum(group.memory_bytes for group in list(self.groups))

    def connect(self, config: LinkConfig) -> Connect:
        """See transport.torch_dist: what `nccl` is there."""

        def connect(store: c10d.Store, side: Side) -> NcclGroup:
            group = TwinGroup(self, store, {"send": 0, "receive": 1}[side])
            return NcclGroup(config, torch.device("cpu"), group, side)

        return connect

    def passage(self, name: str) -> Passage:
        with self._lock:
            return self._passages.setdefault(name, Passage())

    def hold(self) -> None:
        """Let nothing complete until `release`: a busy device."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        for passage in list(self._passages.values()):
            self.advance(passage)

    def advance(self, passage: Passage) -> None:
        """Run what both ends have posted, in order, up to the first that does not match."""
        with passage.changed:
            sent, received = passage.posted.get(0, []), passage.posted.get(1, [])
            while not self._is_held and passage.num_done < min(len(sent), len(received)):
                source, target = sent[passage.num_done], received[passage.num_done]
                if source.num_bytes != target.num_bytes or source.is_lost or target.is_lost:
                    return
                target.payload.copy_(source.payload)
                source.is_done = target.is_done = True
                passage.num_done += 1


class TwinWork:
    """Of one payload."""

    def __init__(self, group: "TwinGroup", payload: torch.Tensor) -> None:
        self.num_bytes = payload.numel()
        self.is_done = False
        self.is_lost = False  # its end was aborted
        self._group = group
        self._payload = weakref.ref(payload)  # NCCL keeps nothing alive

    @property
    def payload(self) -> torch.Tensor:
        """Read or written now."""
        payload = self._payload()
        if payload is None:
            raise self._group.violation("a payload was freed before its end")
        return payload

    def lose(self) -> None:
        """Its end is aborted."""
        self.is_lost = not self.is_done and self.payload is not None

    def is_completed(self) -> bool:
        with self._group.inside("is_completed"):
            return self.is_done

    def exception(self) -> None:
        """The twin never knows of one: the peer's death shows as silence."""

    def wait(self) -> bool:
        """Another stream's turn, and no more."""
        return True


class TwinGroup:
    """One end; the lower rank names the passage, as it makes NCCL's unique id."""

    def __init__(self, fabric: Fabric, store: c10d.Store, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank
        self._maker = threading.get_ident()
        self.calls: list[str] = []  # in which threads are now
        self._is_aborted = False
        if rank == 0:
            store.set("id", uuid.uuid4().hex)
        self._passage = fabric.passage(store.get("id").decode())  # bounded by the store's timeout
        self.memory_bytes = 0
        fabric.groups.add(self)
        with self._passage.changed:
            self._passage.posted[rank] = []
            self._passage.changed.notify_all()

    def send(self, payloads: list[torch.Tensor], peer: int, tag: int) -> TwinWork:
        assert (self._rank, peer) == (0, 1), "a link has one direction"
        return self._post(payloads)

    def recv(self, payloads: list[torch.Tensor], peer: int, tag: int) -> TwinWork:
        assert (self._rank, peer) == (1, 0), "a link has one direction"
        return self._post(payloads)

    def abort(self) -> None:
        if self.calls:
            raise self.violation(f"abort while a thread is inside {self.calls[0]}")
        self._is_aborted = True
        self._fabric.may_abort.wait()
        with self._passage.changed:
            for work in self._passage.posted[self._rank]:
                work.lose()
        self._fabric.groups.discard(self)

    @contextmanager
    def inside(self, call: str) -> Iterator[None]:
        """A thread is inside NCCL."""
        if self._is_aborted:
            raise self.violation(f"{call} after the abort")
        self.calls.append(call)
        try:
            yield
        finally:
            self.calls.remove(call)

    def _post(self, payloads: list[torch.Tensor]) -> TwinWork:
        if "a post" in self.calls:
            raise self.violation("two threads post at once")
        with self.inside("a post"):
            (payload,) = payloads
            if not (payload.is_contiguous() and payload.numel()):
                raise self.violation("a payload that is empty or not contiguous")
            self._rendezvous()
            time.sleep(self._fabric.post_s)
            work = TwinWork(self, payload)
            self._passage.posted[self._rank].append(work)
            self._fabric.advance(self._passage)
            return work

    def _rendezvous(self) -> None:
        """Nothing but the peer, or torch's own patience, ends this."""
        if self.memory_bytes == 0 and threading.get_ident() != self._maker:
            self.violation("a rendezvous on a thread that others wait for")
        with self._passage.changed:
            if not self._passage.changed.wait_for(lambda: len(self._passage.posted) == 2, self._fabric.give_up_s):
                raise RuntimeError("NCCL timeout in communicator initialization")
        self.memory_bytes = MEMORY_BYTES

    def violation(self, what: str) -> RuntimeError:
        self._fabric.violations.append(what)
        return RuntimeError(f"NCCL's rules: {what}")
