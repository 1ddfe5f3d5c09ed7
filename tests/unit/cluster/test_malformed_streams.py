"""What a worker answers on its bidirectional streams to bytes that are no message."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from decode_worker.service import DecodeServicer
from pdserve import rpc
from pdserve.errors import InvalidRequest
from pdserve.internal.v1 import decode_pb2_grpc, link_pb2_grpc
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from transport.base import LinkConfig, Own
from transport.control import LinkServicer, decode_links

CARD = ModelCard("toy", 512, 256, (1, 2), "f00d", KvLayout(2, 1, 8, 16, "float32", "v1"), exact=True)
STREAMS = ("/pdserve.internal.v1.DecodeService/Connect", "/pdserve.internal.v1.LinkService/Open")


@pytest.fixture
async def worker() -> AsyncIterator[tuple[str, list[Any]]]:
    """The streams of a decode worker without an engine: its address, and the commands that it got."""
    commands: list[Any] = []
    links = decode_links(Own(WorkerId("decode-0"), Incarnation("i"), CARD), LinkConfig(), torch.device("cpu"))
    server = rpc.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(commands.append, None), server)  # type: ignore[arg-type]
    link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(links), server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}", commands
    await server.stop(None)
    await links.close()


@pytest.mark.parametrize("stream", STREAMS)
async def test_they_are_refused_and_not_logged(
    worker: tuple[str, list[Any]], stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    address, commands = worker
    async with rpc.channel(address) as channel:
        call = channel.stream_stream(stream, bytes, bytes)()
        await call.write(b"\xff\xff\xff")
        with caplog.at_level(logging.INFO), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(rpc.error_of(caught.value), InvalidRequest)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.records == []
    if stream is STREAMS[0]:
        assert [type(command).__name__ for command in commands] == ["StreamGone"]  # whatever it had begun ends
