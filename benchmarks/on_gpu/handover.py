"""Pages of an 8B-shaped model: out of a cache and into one, and from one process to another over Gloo."""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from benchmarks.on_gpu.report import Context, Row
from engine.kv_cache import PAGE_FORMAT, ROWS_FORMAT, KvCache
from pdserve.model_card import KvLayout
from transport.base import LinkConfig
from transport.seams import Address, Side
from transport.torch_dist import Connect, RendezvousStore, make_slots
from transport.torch_dist import gloo as gloo_groups
from transport.wire import Group

NUM_PAGES = 64
MIB = 2**20
LIMIT_S = 20.0
NEVER = threading.Event()
UseSlot = Callable[[Tensor, int], object]  # with the payload's number
MakeConnect = Callable[[], Connect]  # in each process anew: Gloo's device has a thread, which no fork inherits
Serve = Callable[[Context, Group, "Connection[str, None]"], None]


def config(context: Context, backend: str = "gloo") -> LinkConfig:
    """Of the links measured here."""
    size = 2**14 if context.is_dry else 4 * MIB
    return LinkConfig(backend="nccl" if backend == "nccl" else "gloo", slot_bytes=size, op_timeout_s=LIMIT_S)


def filled_cache(context: Context) -> KvCache:
    """The same noise in every process."""
    layers, heads, dim = (2, 1, 16) if context.is_dry else (32, 8, 128)
    format_ = PAGE_FORMAT if context.is_dry else ROWS_FORMAT
    cache = KvCache(KvLayout(layers, heads, dim, 16, "bfloat16", format_), NUM_PAGES, context.device)
    cache.pages.normal_(generator=torch.Generator(context.device).manual_seed(9))
    return cache


def pages(context: Context) -> Iterator[Row]:
    """What packing and unpacking take, payload by payload, with the wait for their end."""
    cache, rates = filled_cache(context), context.rates
    layout = cache.layout
    for num_pages in (2, 32):
        size = num_pages * layout.page_bytes
        ids = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(num_pages))[:num_pages].tolist()
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=not context.is_dry)
        on_device = torch.empty(size, dtype=torch.uint8, device=context.device)
        cases = [
            ("into pinned memory", cache.read_pages, pinned, rates.to_host_bytes),
            ("into a slot on the device", cache.read_pages, on_device, rates.copy_bytes / 2),
            ("from pinned memory", cache.write_pages, pinned, rates.from_host_bytes),
            ("from a slot on the device", cache.write_pages, on_device, rates.copy_bytes / 2),
        ]
        before = cache.pages.clone()
        for name, copy, buffer, floor in cases:
            seconds = context.median_s(partial(copy, ids, buffer), 20)
            yield Row("pages", f"{size / 1e6:.3g} MB {name}", size / seconds / 1e9, "GB/s", floor / 1e9 or None)
        is_same = torch.equal(cache.pages, before)
        yield Row("pages", f"{size / 1e6:.3g} MB out and in again", None, "", note="the same" if is_same else "WRONG")


def gloo(context: Context) -> Iterator[Row]:
    """Between two processes: bare payloads, then pages packed here and unpacked there."""
    with Peer(context, lambda: gloo_groups(config(context)), serve_gloo) as peer:
        slots = make_slots(config(context), context.device, 4)
        peer.hear()
        bare = _send_all(peer, slots, bare_bytes, context)
        yield Row("gloo", "bare payloads of 4 MiB", bare / 1e9, "GB/s")
        cache = filled_cache(context)
        each = config(context).slot_bytes // cache.layout.page_bytes
        peer.hear()
        staged = _send_all(peer, slots, lambda slot, number: cache.read_pages(run_of(number, each), slot), context)
        rates = [rate for rate in (bare, context.rates.to_host_bytes, context.rates.from_host_bytes) if rate]
        verdict = "every byte arrived" if peer.said == "the same" else f"WRONG: {peer.said}"
        yield Row("gloo", "pages to pages, staged", staged / 1e9, "GB/s", min(rates) / 1e9, verdict)


def num_payloads(context: Context) -> int:
    """Of a run."""
    return 8 if context.is_dry else 64


def run_of(number: int, each: int) -> list[int]:
    """The pages of payload `number`."""
    return [(number * each + index) % NUM_PAGES for index in range(each)]


def _send_all(peer: "Peer", slots: Sequence[Tensor], pack: UseSlot, context: Context) -> float:
    """Bytes per second, until the other end has unpacked the last one."""
    free, flying = deque(slots), deque[tuple[c10d.Work, Tensor]]()
    began = time.perf_counter()
    for number in range(num_payloads(context)):
        if not free:
            work, slot = flying.popleft()
            peer.group.wait(work, NEVER)
            free.append(slot)
        slot = free.popleft()
        pack(slot, number)
        flying.append((peer.group.post(slot), slot))
    for work, _ in flying:
        peer.group.wait(work, NEVER)
    peer.hear()
    return num_payloads(context) * slots[0].numel() / (time.perf_counter() - began)


def serve_gloo(context: Context, group: Group, answers: "Connection[str, None]") -> None:
    """The other end: two runs, the second one into pages, which are then compared."""
    slots = make_slots(config(context), context.device, 4)
    answers.send("ready")
    receive_all(context, group, slots, bare_bytes)
    answers.send("done")
    cache, expected = filled_cache(context), filled_cache(context)
    cache.pages.zero_()
    each = config(context).slot_bytes // cache.layout.page_bytes
    answers.send("ready")
    receive_all(context, group, slots, lambda slot, number: cache.write_pages(run_of(number, each), slot))
    sent = sorted({page for number in range(num_payloads(context)) for page in run_of(number, each)})
    answers.send("the same" if torch.equal(cache.pages[sent], expected.pages[sent]) else "other bytes arrived")


def receive_all(context: Context, group: Group, slots: Sequence[Tensor], unpack: UseSlot) -> None:
    """As many payloads as the other end sends, four under way."""
    count = num_payloads(context)
    flying = deque((group.post(slot), slot) for slot in slots)
    for number in range(count):
        work, slot = flying.popleft()
        group.wait(work, NEVER)
        unpack(slot, number)
        if number + len(slots) < count:
            flying.append((group.post(slot), slot))


def bare_bytes(_slot: Tensor, _number: int) -> None:
    """Neither packed nor unpacked."""


class Peer:
    """A two-rank group with a process that receives. Made before this process touches the device."""

    def __init__(self, context: Context, make: MakeConnect, serve: Serve) -> None:
        self.said = ""
        self._store = RendezvousStore("127.0.0.1", LIMIT_S)
        fork = multiprocessing.get_context("fork")
        self._answers, theirs = fork.Pipe(duplex=False)
        args = (context, self._store.address, make, serve, theirs)
        self._process = fork.Process(target=_run_peer, args=args, daemon=True)
        self._process.start()
        theirs.close()
        self.group = join_group(self._store.address, make, "send")

    def hear(self) -> str:
        """What the other end says next. Raises TimeoutError, EOFError."""
        if not self._answers.poll(LIMIT_S):
            raise TimeoutError("the receiving process says nothing")
        self.said = self._answers.recv()
        return self.said

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def join_group(store: Address, make: MakeConnect, side: Side) -> Group:
    """One end, connected."""
    client = c10d.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    group = make()(c10d.PrefixStore("link/bench", client), side)
    group.meet(NEVER)
    return group


def _run_peer(
    context: Context, store: Address, make: MakeConnect, serve: Serve, answers: "Connection[str, None]"
) -> None:
    """The root of a process."""
    serve(context, join_group(store, make, "receive"), answers)
