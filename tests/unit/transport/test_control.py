"""Frames of the control stream as messages, there and back over the wire format; and links over real streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from pdserve import rpc
from pdserve.errors import Incompatible, LinkDown, ProtocolError
from pdserve.internal.v1 import link_pb2, link_pb2_grpc
from pdserve.request import Incarnation, WorkerId
from tests.unit.transport.pair import CARD, DECODE, Pair, peer, push
from transport.base import LinkConfig, Own
from transport.control import (
    LinkServicer,
    decode_frame,
    decode_links,
    prefill_frame,
    prefill_links,
    request_of,
    response_of,
)
from transport.loopback import Loopback
from transport.protocol import Abort, Announce, DecodeFrame, End, Hello, Landed, PrefillFrame, Ready, Welcome


@pytest.mark.parametrize(
    "frame", [Hello("e", "w", "i", "{}", "gloo", 2**40, 4), Announce(2**40, 5, b"\xff\x00"), End(b"m", "gave up")]
)
def test_frames_of_prefill(frame: PrefillFrame) -> None:
    message = link_pb2.OpenRequest.FromString(request_of(frame).SerializeToString())
    assert prefill_frame(message) == frame


@pytest.mark.parametrize("frame", [Welcome("host", 65535, "i"), Ready(0, ""), Landed(7), Abort(b"", "no room")])
def test_frames_of_decode(frame: DecodeFrame) -> None:
    message = link_pb2.OpenResponse.FromString(response_of(frame).SerializeToString())
    assert decode_frame(message) == frame


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not know"):
        prefill_frame(link_pb2.OpenRequest())
    with pytest.raises(ProtocolError, match="does not know"):
        decode_frame(link_pb2.OpenResponse())


CONFIG = LinkConfig(slot_bytes=64, op_timeout_s=2.0)
CPU = torch.device("cpu")


@asynccontextmanager
async def over_grpc(config: LinkConfig = CONFIG) -> AsyncIterator[Pair]:
    """Both ends as workers make them, prefill with its own idea of the config, over a server and Gloo."""
    server = rpc.server()
    decode = decode_links(Own(DECODE, Incarnation("d1"), CARD), CONFIG, CPU)
    link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(decode), server)
    address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1', 0)}"
    await server.start()
    prefill = prefill_links(Own(WorkerId("prefill-0"), Incarnation("p1"), CARD), config, CPU)
    prefill.connect(replace(peer(), address=address))
    async with asyncio.timeout(10):
        yield Pair(Loopback(config), prefill, decode)
        await prefill.close()
        await decode.close()
        await server.stop(0)


async def test_a_link_over_grpc_and_gloo() -> None:
    async with over_grpc() as p:
        await p.prefill.wait_up(DECODE, 5)
        for value in (7, 8):
            pushed = push(p.link, value)
            offer = await p.offer()
            offer.land()
            slot = await offer.landed
            assert slot is not None
            assert slot.buffer.tolist() == [value] * 8
            slot.give_back()
            assert await pushed
        lost = push(p.link, 9)
        p.decode.cut("pulled the plug")
        with pytest.raises(LinkDown, match="pulled the plug"):
            await lost


async def test_what_decode_has_against_a_link_is_the_same_error_at_prefill() -> None:
    async with over_grpc(replace(CONFIG, num_slots=2)) as p:
        with pytest.raises(Incompatible, match="slot_bytes"):
            await p.prefill.wait_up(DECODE, 5)
