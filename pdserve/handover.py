"""What prefill tells decode about each payload: which pages of which ticket it holds.

Transport carries it as opaque `meta` bytes. A ticket's counter is enough: a link belongs to one incarnation of decode.
"""

import struct
from dataclasses import dataclass

from pdserve.errors import ProtocolError

_FORMAT = struct.Struct("<QII")


@dataclass(frozen=True)
class PageRun:
    """Consecutive KV pages of one ticket. `num_pages` 0 stands for the ticket as a whole (end, abort)."""

    counter: int  # of the ticket
    first_page: int  # index in the ticket's prompt, not a page id
    num_pages: int

    def pack(self) -> bytes:
        """As the `meta` of a payload."""
        return _FORMAT.pack(self.counter, self.first_page, self.num_pages)

    @classmethod
    def unpack(cls, meta: bytes) -> "PageRun":
        """Raises ProtocolError when a peer sent something else."""
        try:
            return cls(*_FORMAT.unpack(meta))
        except struct.error as error:
            raise ProtocolError(f"a payload's meta has {len(meta)} bytes, expected {_FORMAT.size}") from error
