"""Control streams over gRPC: `GrpcControl` is prefill's end, `LinkServicer` decode's; frames as protobuf and back.

The frames are those of `protocol`, field by field; a message with another one inside is a ProtocolError.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import fields
from typing import Any, TypeVar

import grpc.aio
import torch

from pdserve import rpc
from pdserve.errors import PdserveError, ProtocolError
from pdserve.internal.v1 import link_pb2, link_pb2_grpc
from pdserve.membership import WorkerInfo
from transport.base import LinkConfig, Own
from transport.protocol import Abort, Announce, DecodeFrame, End, Hello, Landed, PrefillFrame, Ready, Welcome
from transport.receive import DecodeLinks
from transport.send import PrefillLinks
from transport.torch_dist import RendezvousStore, TorchWires

Frame = TypeVar("Frame", bound=PrefillFrame | DecodeFrame)


def prefill_links(own: Own, config: LinkConfig, device: torch.device) -> PrefillLinks:
    """The links of a prefill worker; `connect` them to decode workers."""
    return PrefillLinks(own, config, GrpcControl(), TorchWires(config, device))


def decode_links(own: Own, config: LinkConfig, device: torch.device) -> DecodeLinks:
    """The links of a decode worker; add a `LinkServicer` of them to its server."""
    store = RendezvousStore(config.host, config.op_timeout_s)
    return DecodeLinks(own, config, TorchWires(config, device, store))


class GrpcControl:
    """See seams.Control."""

    async def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        async with rpc.channel(peer.address) as channel:
            call = link_pb2_grpc.LinkServiceStub(channel).Open(_requests(frames))
            try:
                async for response in call:
                    yield decode_frame(response)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error) from error
            finally:
                call.cancel()


class LinkServicer(link_pb2_grpc.LinkServiceServicer):
    """Serves the links of a decode worker."""

    def __init__(self, links: DecodeLinks) -> None:
        self._links = links

    # A coroutine that writes, not an async generator: gRPC would leave a cancelled generator to the garbage collector.
    async def Open(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[link_pb2.OpenRequest],
        context: grpc.aio.ServicerContext[link_pb2.OpenRequest, link_pb2.OpenResponse],
    ) -> None:
        """Serve one link; see link.proto."""
        frames = (prefill_frame(request) async for request in request_iterator)
        try:
            async with aclosing(self._links.serve(frames)) as answers:
                async for frame in answers:
                    await context.write(response_of(frame))
        except PdserveError as error:
            await rpc.abort(context, error)


async def _requests(frames: AsyncIterator[PrefillFrame]) -> AsyncIterator[link_pb2.OpenRequest]:
    async for frame in frames:
        yield request_of(frame)


def request_of(frame: PrefillFrame) -> link_pb2.OpenRequest:
    """A frame of prefill as a message."""
    return link_pb2.OpenRequest(**_field(frame))


def prefill_frame(message: link_pb2.OpenRequest) -> PrefillFrame:
    """The inverse of `request_of`. Raises ProtocolError."""
    return _frame(message, {"hello": Hello, "announce": Announce, "end": End})


def response_of(frame: DecodeFrame) -> link_pb2.OpenResponse:
    """A frame of decode as a message."""
    return link_pb2.OpenResponse(**_field(frame))


def decode_frame(message: link_pb2.OpenResponse) -> DecodeFrame:
    """The inverse of `response_of`. Raises ProtocolError."""
    return _frame(message, {"welcome": Welcome, "ready": Ready, "landed": Landed, "abort": Abort})


def _field(frame: PrefillFrame | DecodeFrame) -> dict[str, Any]:
    """Frames and messages have the same names and fields."""
    return {type(frame).__name__.lower(): vars(frame)}


def _frame(message: link_pb2.OpenRequest | link_pb2.OpenResponse, kinds: Mapping[str, type[Frame]]) -> Frame:
    name = message.WhichOneof("frame")
    if name is None:
        raise ProtocolError("the peer said something that this version does not know")
    kind, told = kinds[name], getattr(message, name)
    return kind(**{field.name: getattr(told, field.name) for field in fields(kind)})
