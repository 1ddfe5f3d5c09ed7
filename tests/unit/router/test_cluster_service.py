"""GetStatus through a real gRPC server."""

from pdserve import rpc
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc
from router.cluster_service import ClusterServicer


class Source:
    """Three requests wait."""

    def status(self) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(queued_requests=3)


async def test_status() -> None:
    server = rpc.server()
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterServicer(Source()), server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        assert (await stub.GetStatus(pb.GetStatusRequest())).queued_requests == 3
    await server.stop(None)
