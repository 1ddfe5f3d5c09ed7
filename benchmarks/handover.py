"""`make bench-handover`: what moving KV costs between two processes, and how much of it a request gets to see.

    python -m benchmarks.handover [--rounds 5] [--out FILE.json]

throughput  packed payloads of a slot, pages one by one, and bare Gloo, over the same machine in turns
overlap     on a link slowed until moving a prompt's KV would take 80 % of its prefill: the time from the first token
            until decode has everything, beside the time of the last payload alone

Medians, with minimum and maximum, and the limits beside them. Not a test: noisy machines give noisy figures.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.receiver import CPU, DECODE, DECODE_INCARNATION, NUM_PAGES, RAW_PAYLOADS, RawPeer
from benchmarks.run import machine, spread
from cluster.engine_thread import EngineThread
from cluster.model_store import resolve
from engine.load import Engine, EngineConfig, load_engine
from pdserve.handover import PageRun
from pdserve.membership import WorkerInfo
from pdserve.plain import to_plain
from pdserve.request import Incarnation, Sampling, Ticket, WorkerId, WorkRequest
from prefill_worker.commands import Push, PushEnded, Start, StepUpdate
from prefill_worker.worker import PrefillWorker
from transport.base import LinkConfig, Own, SendLink
from transport.control import prefill_links
from transport.seams import Address
from transport.send import PrefillLinks
from transport.torch_dist import RendezvousStore

LENGTHS = (256, 512, 1024)  # prompt tokens
CHUNK_TOKENS = 256
SHARE = 0.8  # of prefill, that moving the KV would take on the slowed link
OWN = WorkerId("prefill-0"), Incarnation("p")


@asynccontextmanager
async def receiver(engine: Engine, config: LinkConfig, raw_store: Address) -> AsyncIterator[PrefillLinks]:
    """The other process, and a link to it."""
    raw = [raw_store.host, raw_store.port]
    given = json.dumps({"card": to_plain(engine.card), "config": to_plain(config), "raw_store": raw})
    command = [sys.executable, "-m", "benchmarks.receiver", given]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    links = prefill_links(Own(*OWN, engine.card), config, CPU)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        links.connect(WorkerInfo(DECODE, "decode", DECODE_INCARNATION, address, process.pid, engine.card))
        await links.wait_up(DECODE, 20)
        yield links
    finally:
        await links.close()
        process.terminate()
        await process.wait()


class Copier:
    """Pushes pages of a cache as prefill does: packed in another thread, as many as the link has slots."""

    def __init__(self, engine: Engine, link: SendLink, config: LinkConfig) -> None:
        self._cache = engine.cache
        self._link = link
        self._page_bytes = engine.card.kv_layout.page_bytes
        self._num_layers = engine.card.kv_layout.num_layers
        self.pages_per_slot = config.slot_bytes // self._page_bytes

    async def bytes_per_s(self, pages_per_payload: int, num_pages: int) -> float:
        """From the first page packed to the last payload landed; the pages lie anywhere in the cache."""
        page_ids = [random.randrange(self._cache.num_pages) for _ in range(num_pages)]
        loop, flying = asyncio.get_running_loop(), set[asyncio.Future[bool]]()
        began = loop.time()
        for first in range(0, num_pages, pages_per_payload):
            while (slot := self._link.try_slot()) is None:
                _, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            part = page_ids[first : first + pages_per_payload]
            num_bytes = await asyncio.to_thread(self._cache.read_pages, part, slot.buffer)
            meta = PageRun(0, first % NUM_PAGES, len(part), 0, self._num_layers).pack()
            flying.add(asyncio.ensure_future(self._link.push(slot, num_bytes, meta)))
        await asyncio.wait(flying)
        return num_pages * self._page_bytes / (loop.time() - began)


async def throughput(copier: Copier, raw: RawPeer, config: LinkConfig, rounds: int) -> dict[str, Any]:
    """GB/s, the three in turns."""
    kinds: dict[str, list[float]] = {"packed": [], "pages": [], "gloo": []}
    loop = asyncio.get_running_loop()
    for _ in range(rounds):
        kinds["packed"].append(await copier.bytes_per_s(copier.pages_per_slot, 64 * copier.pages_per_slot) / 1e9)
        kinds["pages"].append(await copier.bytes_per_s(1, 16 * copier.pages_per_slot) / 1e9)
        began = loop.time()
        await asyncio.to_thread(raw.run)
        kinds["gloo"].append(RAW_PAYLOADS * config.slot_bytes / (loop.time() - began) / 1e9)
    return {kind: spread(values) for kind, values in kinds.items()}


@dataclass
class Driver:
    """Takes a prefill worker's updates to the link, and notes when things happen."""

    worker: PrefillWorker
    link: SendLink
    sampled: float = 0.0
    last_bytes: int = 0  # of the last payload
    done: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def deliver(self, update: StepUpdate) -> None:
        """On the event loop."""
        for push in update.pushes:
            self.last_bytes = push.num_bytes
            self.tasks.add(asyncio.create_task(self._push(push)))
        if update.sampled:
            self.sampled = asyncio.get_running_loop().time()
        if update.done:
            self.done.set()

    async def _push(self, push: Push) -> None:
        await push.link.push(push.slot, push.num_bytes, push.meta)
        self.worker.submit(PushEnded(push.call))

    async def prefill(self, call: int, length: int, vocab_size: int) -> dict[str, float]:
        """One prompt that nobody knows: seconds until the first token, and from there until decode has it all."""
        self.done.clear()
        token_ids = tuple(random.randrange(vocab_size) for _ in range(length))
        work = WorkRequest("", token_ids, length, Sampling(temperature=0.0), max_tokens=2)
        began = asyncio.get_running_loop().time()
        self.worker.submit(Start(call, work, Ticket(DECODE, DECODE_INCARNATION, call), self.link))
        await self.done.wait()
        return {"prefill_s": self.sampled - began, "exposed_s": asyncio.get_running_loop().time() - self.sampled}


async def overlap(driver: Driver, links: PrefillLinks, engine: Engine, rounds: int) -> dict[int, dict[str, Any]]:
    """For each prompt length: how long it takes undisturbed, then what is exposed on a slow link."""
    layout, vocab_size, result, call = engine.card.kv_layout, engine.card.vocab_size, {}, 0
    for length in LENGTHS:
        runs: list[dict[str, float]] = []
        kv_bytes = layout.pages_for(length) * layout.page_bytes
        for number in range(2 * rounds):
            call += 1
            if number == rounds:
                prefill_s = median(run["prefill_s"] for run in runs)
                rate = kv_bytes / (SHARE * prefill_s)
                links.slow(rate, for_s=3600)
            runs.append(await driver.prefill(call, length, vocab_size))
        links.slow(float("inf"), for_s=0)
        last_s = driver.last_bytes / rate
        exposed = [run["exposed_s"] for run in runs[rounds:]]
        result[length] = {
            "prefill_ms": 1000 * prefill_s,
            "exposed_fast_ms": spread([1000 * run["exposed_s"] for run in runs[:rounds]]),
            "transfer_ms": 1000 * SHARE * prefill_s,
            "last_payload_ms": 1000 * last_s,
            "exposed_ms": spread([1000 * each for each in exposed]),
            "ratio": median(exposed) / last_s,
        }
    return result


async def measure(rounds: int) -> dict[str, Any]:
    """Everything."""
    engine = load_engine(EngineConfig(str(resolve("smollm2").folder), "smollm2", num_pages=NUM_PAGES))
    config, store = LinkConfig(), RendezvousStore("127.0.0.1", 20)
    async with receiver(engine, config, store.address) as links:
        link = links.link(DECODE, DECODE_INCARNATION)
        raw = await asyncio.to_thread(RawPeer, config, store.address, "send")
        moved = await throughput(Copier(engine, link, config), raw, config, rounds)
        worker = PrefillWorker(engine, CHUNK_TOKENS, config.slot_bytes)
        driver = Driver(worker, link)
        thread: EngineThread[StepUpdate] = EngineThread(worker, driver.deliver)
        thread.start()
        lengths = await overlap(driver, links, engine, rounds)
        await thread.stop()
    return {"machine": machine(), "gb_per_s": moved, "overlap": lengths}


def table(result: dict[str, Any]) -> str:
    """The figures for a person."""
    moved, lengths = result["gb_per_s"], result["overlap"]
    packed, pages, gloo = (moved[kind]["median"] for kind in ("packed", "pages", "gloo"))
    exposed = [each["exposed_ms"]["median"] for each in lengths.values()]
    rows = [
        ("packed payloads, with pack and unpack", f"{_span(moved['packed'])} GB/s", ""),
        ("pages one by one", f"{_span(moved['pages'])} GB/s", f"packed is {packed / pages:.1f} x, at least 3 x"),
        ("bare Gloo", f"{_span(moved['gloo'])} GB/s", f"packed is {100 * packed / gloo:.0f} %, at least 25 %"),
        *(
            (
                f"exposed transfer, {length} tokens (prefill {each['prefill_ms']:.0f} ms, transfer "
                f"{each['transfer_ms']:.0f} ms)",
                f"{_span(each['exposed_ms'])} ms",
                f"{each['ratio']:.2f} x the last payload's {each['last_payload_ms']:.0f} ms, at most 1.5 x",
            )
            for length, each in lengths.items()
        ),
        ("longest over shortest of these", f"{max(exposed) / min(exposed):.2f} x", "flat over prompt length"),
    ]
    lines = [f"| {name} | {value} | {limit} |" for name, value, limit in rows]
    head = f"{result['machine']}; SmolLM2, bfloat16, one thread per process, slots of 4 MiB"
    return "\n".join([head, "", "| what | median [min..max] | limit |", "|---|---|---|", *lines])


def _span(values: dict[str, float]) -> str:
    digits = 0 if values["median"] >= 10 else 2
    return f"{values['median']:.{digits}f} [{values['min']:.{digits}f}..{values['max']:.{digits}f}]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "handover.json")
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = asyncio.run(measure(parsed.rounds))
    print(table(result))
    parsed.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
