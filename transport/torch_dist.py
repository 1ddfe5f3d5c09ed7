"""The wire of a link over torch.distributed: raw two-rank groups of Gloo or NCCL, and the store where two ends meet.

Gloo cannot abort, says nothing when a peer dies in the middle of a payload, and reports completion only to a blocking
wait: hence a thread per wire (`wire`), the operation timeout, and `ended`. NCCL is polled, and aborted at the end, when
nobody is inside its calls. Neither checks that sizes agree (Gloo kills the process, NCCL hangs): the control stream has
done so before anything is posted. In the tests NCCL's groups also run over a twin of torch's, which keeps NCCL's rules.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d  # the typed home of what torch.distributed re-exports
from torch.distributed import is_nccl_available

from pdserve.errors import ConfigError, LinkDown
from transport.base import LinkConfig
from transport.seams import Address, Side
from transport.wire import Group, TorchWire, brief, running, settle

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

    def meet(self, failed: threading.Event) -> None:
        """Making it has connected it."""

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

    def __init__(self, config: LinkConfig, device: torch.device, group: Any, side: Side) -> None:
        self._op_timeout_s = config.op_timeout_s
        self._group = group  # a ProcessGroupNCCL
        self._post = group.send if side == "send" else group.recv
        self._peer = 1 - _RANKS[side]
        self._greeting = torch.zeros(1, dtype=torch.uint8, device=device)

    def meet(self, failed: threading.Event) -> None:
        """The first post waits, inside NCCL, until the peer is there and the link's memory: never on an event loop."""
        self.wait(self.post(self._greeting), failed)

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
        aborted = running()

        def abort() -> None:
            try:
                self._group.abort()
            except Exception as error:  # the root of a thread
                settle(aborted, LinkDown(f"NCCL could not abort a link: {brief(error)}"))
            settle(aborted)

        threading.Thread(target=abort, name="link-abort", daemon=True).start()
        try:
            aborted.result(NCCL_ABORT_LIMIT_S)
        except TimeoutError:
            raise LinkDown(f"NCCL has not aborted a link in {NCCL_ABORT_LIMIT_S:g} s") from None


Connect = Callable[[c10d.Store, Side], Group]


def gloo(config: LinkConfig) -> Connect:
    """Groups over TCP."""
    # One for all links: each has an I/O thread. An explicit host: else Gloo guesses one from the machine's name.
    device = c10d.ProcessGroupGloo.create_device(hostname=config.host, lazy_init=False)
    return lambda store, side: GlooGroup(config, device, store, side)


def nccl(config: LinkConfig, device: torch.device) -> Connect:
    """Groups of the GPUs that `device` is one of. Raises ConfigError."""
    if not is_nccl_available():
        raise ConfigError("this torch has no NCCL: set backend to gloo, or install torch with CUDA")

    def connect(store: c10d.Store, side: Side) -> NcclGroup:
        torch.cuda.set_device(device)  # of this thread
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=config.op_timeout_s)
        options.config.blocking = 0  # only a non-blocking communicator can be aborted safely
        options.config.max_ctas = NCCL_MAX_CTAS
        group = c10d.ProcessGroupNCCL(store, _RANKS[side], 2, options)
        group.eager_connect_single_device(device)
        return NcclGroup(config, device, group, side)

    return connect


class TorchWires:
    """Makes wires of one process. `store` is needed where wires receive."""

    def __init__(
        self,
        config: LinkConfig,
        device: torch.device,
        store: RendezvousStore | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._store = store
        self._connect = connect or (nccl(config, device) if config.backend == "nccl" else gloo(config))

    def address(self) -> Address:
        if self._store is None:
            raise ConfigError("this process has no rendezvous store: only decode workers receive")
        return self._store.address

    def make(self, side: Side, epoch: str, store: Address) -> TorchWire:

        def group() -> Group:
            # A client of our own: it is one mutex, and a blocking get would stall every other link.
            timeout = timedelta(seconds=self._config.op_timeout_s)
            client = c10d.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
            return self._connect(c10d.PrefixStore(f"link/{epoch}", client), side)

        return TorchWire(group, side)

    def buffers(self, count: int) -> list[torch.Tensor]:
        return make_slots(self._config, self._device, count)
