"""Frames of the control stream as messages, there and back over the wire format."""

import pytest

from pdserve.errors import ProtocolError
from pdserve.internal.v1 import link_pb2
from transport.control import decode_frame, prefill_frame, request_of, response_of
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
