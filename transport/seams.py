"""The seams inside transport: what the two ends of a link (`send`, `receive`) need of the world.

A *link* consists of a *control stream*, on which prefill and decode talk (`protocol`), and a *wire*, over which the
payloads flow. The ends know neither gRPC nor torch.distributed; those are behind `Control` and `Wires`:

    in a cluster             control.GrpcControl, control.LinkServicer        torch_dist.TorchWires
    in one process           loopback.Loopback                                loopback.Loopback
"""

from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from pdserve.membership import WorkerInfo
from transport.protocol import DecodeFrame, PrefillFrame

Side = Literal["send", "receive"]


@dataclass(frozen=True)
class Address:
    """Of a rendezvous store."""

    host: str
    port: int


class Wire(Protocol):
    """The data path of one link: payloads in one direction, matched with the peer's by order alone.

    `up` and the futures of `post` fail with LinkDown. `ended` is done when nothing touches a posted payload any more:
    until then its memory must stay. An exception in `ended` means that this will never be so.
    """

    up: Future[None]
    ended: Future[None]

    def post(self, payload: torch.Tensor) -> Future[None]:
        """Send or receive `payload` (uint8, contiguous) after all that was posted before; never blocks."""

    def fail(self, why: str) -> None:
        """Give up: all futures fail at once, `ended` follows. Only the first reason counts."""


class Wires(Protocol):
    """Makes wires, and memory that they can send from and receive into."""

    def address(self) -> Address:
        """Where the other side of a wire finds us: the rendezvous store of a decode worker."""

    def make(self, side: Side, epoch: str, store: Address) -> Wire:
        """Start to connect one end, without blocking; both ends name the same epoch and store."""

    def buffers(self, count: int) -> list[torch.Tensor]:
        """`count` slots: uint8 [slot_bytes]."""


class Control(Protocol):
    """Opens control streams to decode workers."""

    def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        """Say `frames` to `peer` and yield its answers. Raises the peer's error, or Unavailable when it is gone."""
