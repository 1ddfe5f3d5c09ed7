"""When a starting cluster is ready: the router serving, every worker in its table and linked to the others."""

import asyncio
from contextlib import suppress

import grpc.aio
from grpc_health.v1 import health_pb2

from pdserve import rpc
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc

_RETRY_S = 0.1
_CALL_LIMIT_S = 5.0


async def router_ready(address: str, expected: set[str]) -> None:
    """Return when the router at `address` serves, sees all expected workers, and they have all their links."""
    async with rpc.client_channel(address) as channel:
        await _until_serving(channel)
        await _until_complete(cluster_pb2_grpc.ClusterServiceStub(channel), expected)


async def _until_serving(channel: grpc.aio.Channel) -> None:
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    while True:
        with suppress(grpc.aio.AioRpcError):  # it is being started, or started again
            async for response in watch(health_pb2.HealthCheckRequest(service=""), wait_for_ready=True):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        await asyncio.sleep(_RETRY_S)


def is_linked(status: cluster_pb2.GetStatusResponse) -> bool:
    """Whether every prefill worker has a link to every decode worker."""
    decodes = {worker.id for worker in status.workers if worker.role == "decode"}
    return all(decodes <= set(worker.linked) for worker in status.workers if worker.role == "prefill")


async def _until_complete(stub: "cluster_pb2_grpc.ClusterServiceAsyncStub", expected: set[str]) -> None:
    while True:
        with suppress(grpc.aio.AioRpcError):
            status = await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=_CALL_LIMIT_S)
            if expected <= {worker.id for worker in status.workers} and is_linked(status):
                return
        await asyncio.sleep(_RETRY_S)
