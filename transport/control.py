"""Control streams over gRPC: `GrpcControl` is prefill's end, `LinkServicer` decode's; frames as protobuf and back.

The frames are those of `protocol`, field by field; a message with another one inside is a ProtocolError.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

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
    match frame:
        case Hello():
            return link_pb2.OpenRequest(hello=link_pb2.Hello(**vars(frame)))
        case Announce():
            return link_pb2.OpenRequest(announce=link_pb2.Announce(**vars(frame)))
        case End():
            return link_pb2.OpenRequest(end=link_pb2.End(**vars(frame)))


def prefill_frame(message: link_pb2.OpenRequest) -> PrefillFrame:
    """The inverse of `request_of`. Raises ProtocolError."""
    match message.WhichOneof("frame"):
        case "hello":
            m = message.hello
            return Hello(m.epoch, m.worker, m.incarnation, m.card, m.backend, m.slot_bytes, m.num_slots)
        case "announce":
            return Announce(message.announce.seq, message.announce.num_bytes, message.announce.meta)
        case "end":
            return End(message.end.meta, message.end.aborted)
        case None:
            raise ProtocolError("prefill said something that this version does not know")


def response_of(frame: DecodeFrame) -> link_pb2.OpenResponse:
    """A frame of decode as a message."""
    match frame:
        case Welcome():
            return link_pb2.OpenResponse(welcome=link_pb2.Welcome(**vars(frame)))
        case Ready():
            return link_pb2.OpenResponse(ready=link_pb2.Ready(**vars(frame)))
        case Landed():
            return link_pb2.OpenResponse(landed=link_pb2.Landed(**vars(frame)))
        case Abort():
            return link_pb2.OpenResponse(abort=link_pb2.Abort(**vars(frame)))


def decode_frame(message: link_pb2.OpenResponse) -> DecodeFrame:
    """The inverse of `response_of`. Raises ProtocolError."""
    match message.WhichOneof("frame"):
        case "welcome":
            return Welcome(message.welcome.host, message.welcome.port, message.welcome.incarnation)
        case "ready":
            return Ready(message.ready.seq, message.ready.scrap)
        case "landed":
            return Landed(message.landed.seq)
        case "abort":
            return Abort(message.abort.meta, message.abort.reason)
        case None:
            raise ProtocolError("decode said something that this version does not know")
