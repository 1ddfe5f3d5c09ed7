"""The other public gRPC service of a router: what the cluster looks like from here."""
# ruff: noqa: N802 (gRPC names its methods so)

from typing import Protocol

from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc
from router import call


class StatusSource(Protocol):
    """The router's view of the cluster."""

    def status(self) -> pb.GetStatusResponse:
        """Workers and queue, as they are known now."""
        ...


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """pdserve.v1.ClusterService."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    async def GetStatus(
        self,
        request: pb.GetStatusRequest,  # noqa: ARG002
        context: call.Context,
    ) -> pb.GetStatusResponse:
        """The cluster as this router sees it."""
        async with call.reporting(context, "GetStatus"):
            return self._source.status()
