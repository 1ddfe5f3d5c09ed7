"""What prefill tells decode about each payload: which layers of which pages of which ticket it holds.

Transport carries it as opaque `meta` bytes. A ticket's counter is enough: a link belongs to one incarnation of decode,
and a ticket to one attempt.
"""

import struct
from dataclasses import dataclass

from pdserve.errors import ProtocolError

_FORMAT = struct.Struct("<QIIHHq")
NO_CHECKSUM = -1


@dataclass(frozen=True)
class PageRun:
    """Some layers of consecutive KV pages of one ticket; no pages: the ticket as a whole (end, abort)."""

    counter: int  # of the ticket
    first_page: int  # index in the ticket's prompt, not a page id
    num_pages: int
    first_layer: int
    num_layers: int
    checksum: int = NO_CHECKSUM  # CRC-32 of the payload, where --verify-kv asks for it

    @classmethod
    def whole(cls, counter: int) -> "PageRun":
        """What stands for the ticket as a whole."""
        return cls(counter, 0, 0, 0, 0)

    def pack(self) -> bytes:
        """As the `meta` of a payload."""
        return _FORMAT.pack(
            self.counter, self.first_page, self.num_pages, self.first_layer, self.num_layers, self.checksum
        )

    @classmethod
    def unpack(cls, meta: bytes) -> "PageRun":
        """Raises ProtocolError when a peer sent something else."""
        try:
            return cls(*_FORMAT.unpack(meta))
        except struct.error as error:
            raise ProtocolError(f"a payload's meta has {len(meta)} bytes, expected {_FORMAT.size}") from error
