"""The wire of a link: a raw two-rank group of torch.distributed, Gloo or NCCL, with one thread that waits for it.

A payload's life: `post` enqueues it in the group and returns a future -> the thread waits for it -> the future is
done. A wire's life: connecting (in its thread) -> up -> failed, by `fail` or by an operation that went wrong or
missed its deadline -> ended, when the thread has waited out everything that was posted.

Gloo cannot abort, says nothing when a peer dies in the middle of a payload, and reports completion only to a blocking
wait: hence the thread, the operation timeout, and `ended`. NCCL is polled, and aborted at the end. Neither checks that
sizes agree (Gloo kills the process): the control stream has done so before anything is posted.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d  # the typed home of what torch.distributed re-exports
from torch.distributed import is_nccl_available

from pdserve.errors import ConfigError, LinkDown
from transport.base import LinkConfig
from transport.seams import Address, Side

# The launcher sets these for every worker whose links use NCCL; NCCL and torch read them once per process.
NCCL_ENV: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else a failed link kills the process: we have our own deadlines
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a slow watchdog kills the process
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20",  # s, of connecting; else half an hour
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # several communicators on one device
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a hardware queue per link
}
NCCL_MAX_CTAS = 4  # bounds a link's device memory (about 9 MiB per channel) and the SMs it takes from the model
NCCL_POLL_S = 0.0002
NCCL_ABORT_LIMIT_S = 10.0
_RANKS: Mapping[Side, int] = {"send": 0, "receive": 1}


def make_slots(config: LinkConfig, device: torch.device, count: int) -> list[torch.Tensor]:
    """Staging memory, uint8 [slot_bytes] each: on the device for NCCL, on the host (pinned for a GPU) for Gloo."""
    if config.backend == "nccl":
        return [torch.empty(config.slot_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
    pinned = device.type == "cuda"
    return [torch.empty(config.slot_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]


class RendezvousStore:
    """The store of one decode worker, where both ends of its wires meet. A wire that is up needs it no more."""

    def __init__(self, host: str, timeout_s: float) -> None:
        listener = socket.create_server((host, 0))  # TCPStore's own listener would accept from every interface
        port = listener.getsockname()[1]
        self.address = Address(host, port)
        self._store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )


class TorchWires:
    """Makes wires of one process. `store` is needed where wires receive."""

    def __init__(self, config: LinkConfig, device: torch.device, store: RendezvousStore | None = None) -> None:
        if config.backend == "nccl" and not is_nccl_available():
            raise ConfigError("this torch has no NCCL: set backend to gloo, or install torch with CUDA")
        self._config = config
        self._device = device
        self._store = store
        # One for all links: each has an I/O thread. An explicit host: else Gloo guesses one from the machine's name.
        self._gloo = c10d.ProcessGroupGloo.create_device(hostname=config.host, lazy_init=False)

    def address(self) -> Address:
        if self._store is None:
            raise ConfigError("this process has no rendezvous store: only decode workers receive")
        return self._store.address

    def make(self, side: Side, epoch: str, store: Address) -> "TorchWire":

        def group() -> Group:
            # A client of our own: it is one mutex, and a blocking get would stall every other link.
            timeout = timedelta(seconds=self._config.op_timeout_s)
            client = c10d.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
            prefixed = c10d.PrefixStore(f"link/{epoch}", client)
            if self._config.backend == "nccl":
                return NcclGroup(self._config, self._device, prefixed, side)
            return GlooGroup(self._config, self._gloo, prefixed, side)

        return TorchWire(group, side)

    def buffers(self, count: int) -> list[torch.Tensor]:
        return make_slots(self._config, self._device, count)


class Group(Protocol):
    """What a wire needs of a two-rank group. Making one blocks until both ends have met.

    `post` may be called by one thread at a time; the rest belongs to the thread that made it.
    """

    def post(self, payload: torch.Tensor) -> c10d.Work:
        """Enqueue; never blocks."""

    def wait(self, work: c10d.Work, failed: threading.Event) -> None:
        """Until the payload is there. Raises when it will not be."""

    def close(self) -> None:
        """Let go of all memory; raises LinkDown when that takes too long."""


class GlooGroup:
    """Two processes over TCP."""

    def __init__(self, config: LinkConfig, device: c10d.ProcessGroupGloo.Device, store: c10d.Store, side: Side) -> None:
        self._op_timeout = timedelta(seconds=config.op_timeout_s)
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = 1
        options._timeout = self._op_timeout / 2  # to meet at the store; connecting may then take five times as long
        options._devices = [device]
        group: Any = c10d.ProcessGroupGloo(store, _RANKS[side], 2, options)
        self._post = group.send if side == "send" else group.recv
        self._peer = 1 - _RANKS[side]

    def post(self, payload: torch.Tensor) -> c10d.Work:
        work: c10d.Work = self._post([payload], self._peer, 0)
        return work

    def wait(self, work: c10d.Work, failed: threading.Event) -> None:  # noqa: ARG002 - Gloo's wait cannot be interrupted
        """See Group. Not to be cut into short waits: a timeout closes the pair."""
        work.wait(self._op_timeout)

    def close(self) -> None:
        """Nothing is in flight any more when all waits have returned."""


class NcclGroup:
    """Two processes over NVLink, PCIe or RDMA. Payloads are matched by order alone, on the group's own stream."""

    def __init__(self, config: LinkConfig, device: torch.device, store: c10d.Store, side: Side) -> None:
        torch.cuda.set_device(device)  # of this thread
        self._op_timeout_s = config.op_timeout_s
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=config.op_timeout_s)
        options.config.blocking = 0  # only a non-blocking communicator can be aborted safely
        options.config.max_ctas = NCCL_MAX_CTAS
        group: Any = c10d.ProcessGroupNCCL(store, _RANKS[side], 2, options)
        group.eager_connect_single_device(device)
        self._group = group
        self._post = group.send if side == "send" else group.recv
        self._peer = 1 - _RANKS[side]

    def post(self, payload: torch.Tensor) -> c10d.Work:
        work: c10d.Work = self._post([payload], self._peer, 0)
        return work

    def wait(self, work: c10d.Work, failed: threading.Event) -> None:
        """See Group. `work.wait` would only order streams; the event behind `is_completed` is the completion."""
        deadline = time.monotonic() + self._op_timeout_s
        while not work.is_completed():
            if failed.wait(NCCL_POLL_S):
                raise LinkDown("the link failed meanwhile")
            if time.monotonic() > deadline:
                raise LinkDown(f"a payload took more than {self._op_timeout_s:g} s")
        if error := work.exception():  # is_completed is true then as well
            raise LinkDown(f"NCCL: {error}")

    def close(self) -> None:
        """Abort, also after a good end: a destroy waits for the peer. It may hang behind a killed peer's kernel."""
        side_thread = threading.Thread(target=self._group.abort, name="link-abort", daemon=True)
        side_thread.start()
        side_thread.join(NCCL_ABORT_LIMIT_S)
        if side_thread.is_alive():
            raise LinkDown(f"NCCL has not aborted a link in {NCCL_ABORT_LIMIT_S:g} s")


class TorchWire:
    """One end of the data path, see `Wire`: posts from the caller's thread, waits in its own."""

    def __init__(self, connect: Callable[[], Group], side: Side) -> None:
        self.up = _running()
        self.ended = _running()
        self._lock = threading.Lock()  # over _group, _why, _unfinished, and the order of posts
        self._group: Group | None = None
        self._why = ""
        self._failed = threading.Event()
        self._unfinished: set[Future[None]] = set()
        # (work, payload, its future): the payload's memory stays referenced until the wait has returned
        self._posted: queue.SimpleQueue[tuple[c10d.Work, torch.Tensor, Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(connect,), name=f"link-{side}", daemon=True).start()

    def post(self, payload: torch.Tensor) -> Future[None]:
        done = _running()
        why = "a payload was posted before the wire was up"
        with self._lock:
            if self._group is not None and not self._why:
                try:
                    self._posted.put((self._group.post(payload), payload, done))
                    self._unfinished.add(done)
                    return done
                except RuntimeError as error:
                    why = _brief(error)
        self.fail(why)
        _settle(done, LinkDown(self._why))
        return done

    def fail(self, why: str) -> None:
        """See Wire; from any thread."""
        with self._lock:
            if self._why:
                return
            self._why = why
            unfinished, self._unfinished = self._unfinished, set()
        self._failed.set()
        self._posted.put(None)  # after everything that was posted: posts are refused from now on
        for future in (self.up, *unfinished):
            _settle(future, LinkDown(why))

    def _run(self, connect: Callable[[], Group]) -> None:
        problem: Exception | None = None
        try:
            self._group = connect()
            _settle(self.up)
            self._wait_for_all(self._group)
            self._group.close()
        except Exception as error:
            self.fail(_brief(error))
            problem = error if self._group is not None else None  # a failed connect leaves nothing behind
        with self._lock:
            self._group = None  # before `ended`: what follows may be the end of the process
        _settle(self.ended, problem)

    def _wait_for_all(self, group: Group) -> None:
        """Until the wire has failed and all that was posted has been waited for."""
        while (posted := self._posted.get()) is not None:
            work, _payload, done = posted
            try:
                group.wait(work, self._failed)
            except (RuntimeError, LinkDown) as error:
                self.fail(_brief(error))
            with self._lock:
                self._unfinished.discard(done)
            _settle(done, LinkDown(self._why) if self._why else None)


def _running() -> Future[None]:
    """A future that nobody's impatience can cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: Future[None], error: Exception | None = None) -> None:
    """The thread and `fail` may both come to the end of a future: the first one counts."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass


def _brief(error: Exception) -> str:
    """The first line of a message of torch, which carries a stack trace behind it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
