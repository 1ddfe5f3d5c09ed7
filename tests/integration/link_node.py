"""One end of links in a process of its own, for test_links.py: driven by lines of JSON on its standard input.

Answers and events are lines of JSON on its standard output.
"""

import asyncio
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import torch

from pdserve import rpc
from pdserve.errors import PdserveError
from pdserve.internal.v1 import link_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from transport.base import LinkConfig, Own
from transport.control import LinkServicer, decode_links, prefill_links
from transport.protocol import Limits
from transport.receive import DecodeLinks, DecodeOffer
from transport.send import PrefillLinks

CARD = ModelCard("toy", 10, 64, (1,), "f00d", KvLayout(1, 1, 2, 4, "float32", "plain"), exact=True)
CPU = torch.device("cpu")
SLOT_BYTES = 4 * 2**20


def say(**event: Any) -> None:
    """One line to the test."""
    print(json.dumps({**event, "time": time.monotonic()}), flush=True)


def content(seed: int, num_bytes: int) -> torch.Tensor:
    """What payload `seed` holds."""
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(payload: torch.Tensor) -> str:
    return hashlib.blake2b(payload.numpy().tobytes(), digest_size=8).hexdigest()


def resources() -> dict[str, int]:
    """What a leak would show in."""
    return {"threads": len(os.listdir("/proc/self/task")), "fds": len(os.listdir("/proc/self/fd"))}


class NoLimits(Limits):
    """For a prefill that does not keep to the protocol."""

    def check(self, num_bytes: int, outstanding: int) -> None:
        """Anything goes."""


@dataclass
class Decode:
    """Lands everything, but what begins with "scrap"."""

    links: DecodeLinks
    num_slots: int
    check: bool = True  # digests of what lands
    hold: bool = False  # keep the slots of what lands: what is announced beyond them waits for ever
    held: list[Any] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def receive(self) -> None:
        async for offer in self.links.offers():
            if offer.meta.startswith(b"scrap"):
                offer.scrap("told so")
            else:
                offer.land()
                if self.check:
                    say(event="posted", meta=offer.meta.decode())
                self.tasks.append(asyncio.create_task(self.land(offer)))
                if self.hold and len(self.tasks) == self.num_slots + 1:
                    say(event="full")

    async def land(self, offer: DecodeOffer) -> None:
        try:
            slot = await offer.landed
        except PdserveError as error:
            say(event="lost", meta=offer.meta.decode(), error=type(error).__name__, why=str(error))
            return
        assert slot is not None
        if self.hold:
            self.held.append(slot)
            return
        if self.check:
            say(event="landed", meta=offer.meta.decode(), digest=digest(slot.buffer))
        slot.give_back()


@dataclass
class Prefill:
    links: PrefillLinks
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def connect(self, address: str, incarnation: str) -> None:
        info = WorkerInfo(WorkerId("decode-0"), "decode", Incarnation(incarnation), address, 1, CARD)
        self.links.connect(info)

    async def push(self, meta: str, seed: int, num_bytes: int, incarnation: str) -> None:
        link = self.links.link(WorkerId("decode-0"), Incarnation(incarnation))
        while (slot := link.try_slot()) is None and link.is_up:
            await asyncio.sleep(0.001)
        if slot is None:
            say(event="lost", meta=meta, error="LinkDown", why="no slot: the link is down")
            return
        slot.buffer[:num_bytes] = content(seed, num_bytes)
        try:
            self.tasks.append(asyncio.create_task(self.wait(meta, link.push(slot, num_bytes, meta.encode()))))
        except PdserveError as error:
            say(event="lost", meta=meta, error=type(error).__name__, why=str(error))

    async def wait(self, meta: str, pushed: Awaitable[bool]) -> None:
        try:
            say(event="pushed", meta=meta, kept=await pushed)
        except PdserveError as error:
            say(event="lost", meta=meta, error=type(error).__name__, why=str(error))

    async def flood(self, incarnation: str) -> None:
        """Push until the link is down; the event says when the first waiter heard of it."""
        link = self.links.link(WorkerId("decode-0"), Incarnation(incarnation))
        count, told = 0, False
        pushes: set[asyncio.Future[bool]] = set()
        try:
            while link.is_up:
                while slot := link.try_slot():
                    pushes.add(asyncio.ensure_future(link.push(slot, SLOT_BYTES, b"flood")))
                done, pushes = await asyncio.wait(pushes, return_when=asyncio.FIRST_COMPLETED)
                count += sum(1 for push in done if push.result())
                if count >= 20 and not told:  # one wait may end several pushes
                    told = True
                    say(event="flooding")
        except PdserveError as error:
            say(event="flood_lost", error=type(error).__name__, why=str(error))
        lost = await asyncio.gather(*pushes, return_exceptions=True)
        say(event="flood_over", errors=[type(error).__name__ for error in lost])


async def run_decode(incarnation: str, config: LinkConfig) -> None:
    links = decode_links(Own(WorkerId("decode-0"), Incarnation(incarnation), CARD), config, CPU)
    server = rpc.server()
    link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(links), server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    decode = Decode(links, config.num_slots)
    receiver = asyncio.create_task(decode.receive())
    say(event="serving", port=port)
    async for command in commands():
        match command:
            case {"do": "check", "on": on}:
                decode.check = on
            case {"do": "hold", "on": on}:
                decode.hold = on
            case {"do": "cut"}:
                say(event="cut", links=links.cut())
            case {"do": "resources"}:
                say(event="resources", **resources())
    receiver.cancel()
    await links.close()
    await server.stop(0)
    say(event="closed", fatal=links.fatal.done())


async def run_prefill(incarnation: str, config: LinkConfig) -> None:
    prefill = Prefill(prefill_links(Own(WorkerId("prefill-0"), Incarnation(incarnation), CARD), config, CPU))
    async for command in commands():
        try:
            await obey(prefill, command)
        except PdserveError as error:
            say(event="error", error=type(error).__name__, why=str(error))
    await prefill.links.close()
    say(event="closed", fatal=prefill.links.fatal.done())


async def obey(prefill: Prefill, command: dict[str, Any]) -> None:
    arguments = {name: value for name, value in command.items() if name != "do"}
    match command["do"]:
        case "connect":
            prefill.connect(**arguments)
        case "wait_up":
            await prefill.links.wait_up(WorkerId("decode-0"), 20)
            say(event="up", links=prefill.links.links_up())
        case "push":
            await prefill.push(**arguments)
        case "flood":
            prefill.tasks.append(asyncio.create_task(prefill.flood(**arguments)))
        case "cancel_last":
            prefill.tasks[-1].cancel()
        case "cut" | "slow" | "forget" as fault:
            inflict(prefill.links, fault, arguments)
        case "lie":  # announce more than a slot holds, past our own checks
            link = prefill.links.link(WorkerId("decode-0"), Incarnation(arguments["incarnation"]))
            link._end._limits = NoLimits(0, 0)
            slot = link.try_slot()
            assert slot is not None
            prefill.tasks.append(asyncio.create_task(prefill.wait("lie", link.push(slot, arguments["num_bytes"], b""))))
        case "resources":
            say(event="resources", **resources())


def inflict(links: PrefillLinks, fault: str, arguments: dict[str, Any]) -> None:
    match fault:
        case "cut":
            say(event="cut", links=links.cut())
        case "slow":
            links.slow(**arguments)
        case "forget":
            links.forget(WorkerId("decode-0"))


async def commands() -> Any:
    """Lines of standard input, until it ends."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=read, daemon=True).start()
    while line := await lines.get():
        yield json.loads(line)


def run(lines: socket.socket, role: str, incarnation: str, op_timeout_s: float) -> None:
    """The life of the process."""
    sys.stdin, sys.stdout = lines.makefile("r"), lines.makefile("w")
    torch.set_num_threads(1)
    config = LinkConfig(slot_bytes=SLOT_BYTES, op_timeout_s=op_timeout_s)
    asyncio.run(run_decode(incarnation, config) if role == "decode" else run_prefill(incarnation, config))
