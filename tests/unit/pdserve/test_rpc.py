"""What every server of ours does with calls that are no messages, and what errors become on the way."""

import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from pdserve import rpc
from pdserve.errors import InvalidRequest, QueueFull
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc

HEALTH = "/grpc.health.v1.Health/"
JUNK = b"\xff\xff\xff"
NOT_UTF8 = b"\x0a\x02\xc3\x28"  # field 1, a string


async def answer(channel: grpc.aio.Channel, method: str, raw: bytes) -> Any:
    """The first response to a request of these bytes."""
    if method == "Check":
        return await channel.unary_unary(HEALTH + method, bytes, bytes)(raw)
    return await channel.unary_stream(HEALTH + method, bytes, bytes)(raw).read()


@pytest.mark.parametrize("value", ["x" * 100_000, "\x00" * 5000, "\U0001f600" * 5000])
async def test_an_error_with_a_long_value_in_it_arrives(value: str) -> None:
    server = rpc.server()

    async def refuse(_: bytes, context: Any) -> bytes:
        await rpc.abort(context, InvalidRequest("field", f"{value!r} is unknown; must be short"))

    handler = grpc.unary_unary_rpc_method_handler(refuse, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Refuse": handler}),))
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/Refuse", bytes, bytes)(b"")
    await server.stop(0)
    error = rpc.error_of(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "field"
    assert error.problem.endswith("is unknown; must be short")


@pytest.mark.parametrize("method", ["Check", "Watch"])
@pytest.mark.parametrize("raw", [JUNK, NOT_UTF8])
async def test_bytes_that_are_no_message_are_invalid_and_not_logged(
    method: str, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = rpc.server()
    await rpc.add_health_and_reflection(server, []).set(serving=True)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            with caplog.at_level(logging.INFO), pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(channel, method, raw)
            assert isinstance(rpc.error_of(caught.value), InvalidRequest)
            assert caplog.records == []
            assert await answer(channel, method, health_pb2.HealthCheckRequest().SerializeToString())
    finally:
        await server.stop(None)


class Full(cluster_pb2_grpc.ClusterServiceServicer):
    """Has no room for anybody."""

    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]
        await rpc.abort(context, QueueFull("full", 1.5))


async def test_a_flood_is_refused_by_us_and_not_by_grpc() -> None:
    server = rpc.server()
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(Full(), server)  # type: ignore[abstract]
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        calls = [stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=60) for _ in range(2000)]
        codes = {await call.code() for call in calls}
    await server.stop(None)
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
