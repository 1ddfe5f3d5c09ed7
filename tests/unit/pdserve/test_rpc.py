"""What every server of ours does with calls that are no messages, and what errors become on the way."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pdserve import rpc
from pdserve.errors import DeadlineExceeded, InvalidRequest, QueueFull
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT, ECHO = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/test.Service/Echo"
JUNK = b"\xff\xff\xff"
NOT_UTF8 = b"\x0a\x02\xc3\x28"  # field 1, a string
GOOD = {
    CHECK: health_pb2.HealthCheckRequest(),
    WATCH: health_pb2.HealthCheckRequest(),
    REFLECT: reflection_pb2.ServerReflectionRequest(list_services=""),
    ECHO: health_pb2.HealthCheckRequest(),
}


async def answer(channel: grpc.aio.Channel, method: str, raw: bytes) -> Any:
    """The first response to a request of these bytes."""
    if method == CHECK:
        return await channel.unary_unary(method, bytes, bytes)(raw)
    if method == WATCH:
        return await channel.unary_stream(method, bytes, bytes)(raw).read()
    call = channel.stream_stream(method, bytes, bytes)()
    await call.write(raw)
    return await call.read()


def serve(server: grpc.aio.Server, **handlers: "grpc.RpcMethodHandler[Any, Any]") -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))


async def echo(requests: AsyncIterator[health_pb2.HealthCheckRequest], context: Any) -> None:
    """Like a worker's streams: a coroutine that writes."""
    async for request in requests:
        await context.write(request.SerializeToString() + b"!")


def echo_handler() -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.stream_stream_rpc_method_handler(echo, health_pb2.HealthCheckRequest.FromString, bytes)


@pytest.mark.parametrize("value", ["x" * 100_000, "\x00" * 5000, "\U0001f600" * 5000])
async def test_an_error_with_a_long_value_in_it_arrives(value: str) -> None:
    server = rpc.server()

    async def refuse(_: bytes, context: Any) -> bytes:
        await rpc.abort(context, InvalidRequest("field", f"{value!r} is unknown; must be short"))

    serve(server, Refuse=grpc.unary_unary_rpc_method_handler(refuse, bytes, bytes))
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


@pytest.mark.parametrize("method", GOOD)
@pytest.mark.parametrize("raw", [JUNK, NOT_UTF8])
async def test_bytes_that_are_no_message_are_invalid_and_not_logged(
    method: str, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = rpc.server()
    serve(server, Echo=echo_handler())
    await rpc.add_health_and_reflection(server, []).set(serving=True)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            with caplog.at_level(logging.INFO), pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(channel, method, raw)
            assert isinstance(rpc.error_of(caught.value), InvalidRequest)
            assert caplog.records == []
            assert await answer(channel, method, GOOD[method].SerializeToString())
    finally:
        await server.stop(None)


async def test_a_stream_is_served_up_to_the_bytes_that_are_no_message() -> None:
    server = rpc.server()
    serve(server, Echo=echo_handler())
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(ECHO, bytes, bytes)()
        await call.write(health_pb2.HealthCheckRequest(service="a").SerializeToString())
        assert await call.read() == b"\x0a\x01a!"
        await call.write(JUNK)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)


async def test_an_error_after_a_write_that_was_cut_off_is_for_nobody_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = rpc.server()
    ended = asyncio.Event()

    async def late(_: bytes, context: Any) -> None:
        writing = asyncio.create_task(context.write(b"first"))
        await asyncio.sleep(0)  # gRPC has the message, and the headers before it
        writing.cancel()
        try:
            await rpc.abort(context, DeadlineExceeded("too late"))
        finally:
            ended.set()

    serve(server, Late=grpc.unary_stream_rpc_method_handler(late, bytes, bytes))
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/test.Service/Late", bytes, bytes)(b"", timeout=0.5)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        await ended.wait()
    await server.stop(None)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


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
