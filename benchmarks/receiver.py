"""The decode end of `benchmarks.handover`, a process of its own: lands payloads and scatters them into pages.

    python -m benchmarks.receiver '{"card": {...}, "config": {...}, "raw_store": [host, port]}'

Says its address on standard output and ends with its standard input. Beside its link it serves raw runs: payloads over
bare Gloo, which nobody packs, announces or unpacks.
"""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import torch
from torch._C import _distributed_c10d as c10d

from engine.kv_cache import KvCache
from pdserve import rpc
from pdserve.handover import PageRun
from pdserve.internal.v1 import link_pb2_grpc
from pdserve.model_card import ModelCard
from pdserve.plain import from_plain
from pdserve.request import Incarnation, WorkerId
from transport.base import LinkConfig, Offer, Own
from transport.control import LinkServicer, decode_links
from transport.seams import Address, Side
from transport.torch_dist import GlooGroup

NUM_PAGES = 256
RAW_DEPTH = 4
RAW_PAYLOADS = 64  # of a run
CPU = torch.device("cpu")
DECODE, DECODE_INCARNATION = WorkerId("decode-0"), Incarnation("d")


class RawPeer:
    """One end of two ranks of Gloo, and nothing else. Belongs to one thread."""

    def __init__(self, config: LinkConfig, store: Address, side: Side) -> None:
        client = c10d.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=60))
        device = c10d.ProcessGroupGloo.create_device(hostname=store.host, lazy_init=False)
        self._group = GlooGroup(replace(config, op_timeout_s=600), device, client, side)
        self._buffers = [torch.zeros(config.slot_bytes, dtype=torch.uint8) for _ in range(RAW_DEPTH)]
        self._never = threading.Event()

    def run(self) -> None:
        """Move RAW_PAYLOADS payloads of a slot each, RAW_DEPTH at a time; a byte ahead of them, to begin together."""
        self._group.wait(self._group.post(self._buffers[0][:1]), self._never)
        works = [self._group.post(buffer) for buffer in self._buffers]
        for number in range(RAW_PAYLOADS):
            self._group.wait(works.pop(0), self._never)
            if number + RAW_DEPTH < RAW_PAYLOADS:
                works.append(self._group.post(self._buffers[number % RAW_DEPTH]))


def serve_raw(config: LinkConfig, store: Address) -> None:
    """Run for as long as the other end likes."""
    peer = RawPeer(config, store, "receive")
    while True:
        try:
            peer.run()
        except RuntimeError:  # it is gone
            return


class Scatter:
    """What a decode worker does with offers; the copying in another thread, as there."""

    def __init__(self, card: ModelCard) -> None:
        self._cache = KvCache(card.kv_layout, NUM_PAGES, CPU)

    async def serve(self, offers: AsyncIterator[Offer]) -> None:
        """Land everything."""
        async with asyncio.TaskGroup() as group:
            async for offer in offers:
                group.create_task(self._land(offer))

    async def _land(self, offer: Offer) -> None:
        offer.land()
        slot = await offer.landed
        assert slot is not None
        await asyncio.to_thread(self._unpack, PageRun.unpack(offer.meta), slot.buffer)
        slot.give_back()

    def _unpack(self, run: PageRun, payload: torch.Tensor) -> None:
        page_ids = [(run.first_page + i) % NUM_PAGES for i in range(run.num_pages)]
        self._cache.write_pages(page_ids, payload, range(run.first_layer, run.first_layer + run.num_layers))


async def main() -> None:
    """Serve one link until standard input ends."""
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    card, config = from_plain(ModelCard, given["card"]), from_plain(LinkConfig, given["config"])
    threading.Thread(target=serve_raw, args=(config, Address(*given["raw_store"])), daemon=True).start()
    links = decode_links(Own(DECODE, DECODE_INCARNATION, card), config, CPU)
    server = rpc.server()
    link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(links), server)
    port = rpc.listen(server, config.host, 0)
    await server.start()
    print(f"{config.host}:{port}", flush=True)
    serving = asyncio.create_task(Scatter(card).serve(links.offers()))
    await asyncio.to_thread(sys.stdin.read)
    serving.cancel()
    await links.close()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
