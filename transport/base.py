"""What the workers see of transport: payloads of bytes over links, each from one prefill to one decode worker.

    prefill    slot = link.try_slot(); fill slot.buffer; landed = await link.push(slot, num_bytes, meta)
    decode     async for offer in links.offers(): offer.land(); slot = await offer.landed; empty it; slot.give_back()

Transport knows no requests: `meta` is the workers' own. Unless said otherwise, everything here belongs to the thread
of the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from pdserve.membership import WorkerInfo
from pdserve.model_card import ModelCard
from pdserve.request import Incarnation, WorkerId
from transport.protocol import Limits


@dataclass(frozen=True)
class LinkConfig:
    """How links are made; the two workers must agree on all but the host."""

    backend: Literal["gloo", "nccl"] = "gloo"
    slot_bytes: int = 4 * 2**20
    num_slots: int = 4  # payloads outstanding on one link
    op_timeout_s: float = 5.0  # of one payload on the wire, and of each step of connecting
    push_timeout_s: float = 30.0  # from Announce to Landed: decode may wait for a slot, but not for ever
    host: str = "127.0.0.1"  # the address of this machine that wires and the rendezvous store bind to

    @property
    def limits(self) -> Limits:
        """What the protocol needs of it."""
        return Limits(self.slot_bytes, self.num_slots)


@dataclass(frozen=True)
class Own:
    """Who this end is."""

    worker: WorkerId
    incarnation: Incarnation
    card: ModelCard


class SendSlot(Protocol):
    """A staging buffer on loan from a link; `push` takes it over."""

    @property
    def buffer(self) -> torch.Tensor:
        """Shape [slot_bytes], uint8."""

    def give_back(self) -> None:
        """Return an unused slot; from any thread, a second call does nothing."""


class SendLink(Protocol):
    """The link to one incarnation of one decode worker. Once down it never comes up again: ask for the new one."""

    @property
    def is_up(self) -> bool:
        """Whether payloads can be pushed; from any thread."""

    def try_slot(self) -> SendSlot | None:
        """A free slot, from any thread; None while all are outstanding, and for ever once the link is down."""

    def push(self, slot: SendSlot, num_bytes: int, meta: bytes) -> Awaitable[bool]:
        """Announce at once, in the order of the calls; the result says whether decode kept (True) or scrapped it.

        The bytes must be complete, device work included. Raises LinkDown, at once or from the awaitable. Cancelling
        the wait stops nothing: what is announced is sent, and the slot returns to the link whatever happens.
        """

    def end(self, meta: bytes, aborted: str) -> None:
        """Tell decode that `meta` is complete (""), or why it was given up. Does nothing when the link is down."""


class SendLinks(Protocol):
    """The links of a prefill worker."""

    @property
    def fatal(self) -> asyncio.Future[str]:
        """Done when only a restart can save this process; says why."""

    def connect(self, peer: WorkerInfo) -> None:
        """Keep a link to this decode worker, in the background; a second call for the same one does nothing."""

    def forget(self, worker: WorkerId) -> None:
        """Keep none."""

    def link(self, worker: WorkerId, incarnation: Incarnation) -> SendLink:
        """The link that is up now. Raises LinkDown when there is none, Incompatible when there can be none."""

    def links_up(self) -> Mapping[WorkerId, Incarnation]:
        """The decode workers reached now."""

    async def wait_up(self, worker: WorkerId, timeout_s: float) -> None:
        """Wait for a link to `worker`. Raises like `link`."""

    def aborts(self) -> AsyncIterator[tuple[Incarnation, bytes, str]]:
        """What decode workers want nothing more of: (of decode, meta, reason). Never ends by itself.

        Only a link that is up brings one: what was said on a dead link is lost with it.
        """

    async def close(self) -> None:
        """Close all links and wait until their threads have ended."""


class ReceiveSlot(Protocol):
    """A payload that landed."""

    @property
    def buffer(self) -> torch.Tensor:
        """Shape [num_bytes], uint8."""

    def give_back(self) -> None:
        """The payload is used up, device work included; from any thread, a second call does nothing."""


class Offer(Protocol):
    """A payload that prefill announced. Call `land` or `scrap`, once; the payload arrives either way."""

    @property
    def meta(self) -> bytes:
        """What prefill said that it is."""

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""

    @property
    def landed(self) -> Awaitable[ReceiveSlot | None]:
        """A future: None when scrapped. Raises LinkDown."""

    def land(self) -> None:
        """Take it into the next free slot of the same link."""

    def scrap(self, reason: str) -> None:
        """Nobody wants it: it goes to scratch memory."""

    def abort(self, reason: str) -> None:
        """Tell prefill that nothing more of this `meta` is wanted."""


class ReceiveLinks(Protocol):
    """The links of a decode worker."""

    @property
    def fatal(self) -> asyncio.Future[str]:
        """Done when only a restart can save this process; says why."""

    def offers(self) -> AsyncIterator[Offer]:
        """What is announced, per link in order. Never ends by itself."""

    def ends(self) -> AsyncIterator[tuple[bytes, str]]:
        """What prefill is through with: (meta, why it gave up or ""). Never ends by itself."""

    async def close(self) -> None:
        """Close all links and wait until their threads have ended."""
