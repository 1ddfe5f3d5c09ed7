"""Where prefixes lie, as far as this router has sent them there itself.

A guess: a worker may have forgotten a page, or have one from another router. Both cost a little time and nothing else.
Liveness and capacity come first in `policy`; among workers that have both, this saves computing and moving KV again.
"""

from collections.abc import Sequence

from pdserve.prefix import prompt_hashes
from pdserve.request import Incarnation

MAX_PAGES = 2**17  # remembered over all workers, the least recently used forgotten first


class Affinity:
    """Which incarnation has seen which pages."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: dict[tuple[Incarnation, bytes], None] = {}

    def note(self, prefix: "Prefix", incarnation: Incarnation) -> None:
        """A prompt goes to this worker."""
        for page_hash in prefix.hashes:
            self._pages.pop((incarnation, page_hash), None)
            self._pages[incarnation, page_hash] = None
        while len(self._pages) > self._max_pages:
            del self._pages[next(iter(self._pages))]

    def known_tokens(self, prefix: "Prefix", incarnation: Incarnation) -> int:
        """Tokens at the beginning of a prompt that this worker has probably kept."""
        num_pages = 0
        for page_hash in prefix.hashes:
            if (incarnation, page_hash) not in self._pages:
                break
            num_pages += 1
        return num_pages * prefix.page_tokens


class Prefix:
    """The whole pages of one prompt, by name."""

    def __init__(self, token_ids: Sequence[int], page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.hashes = prompt_hashes(token_ids, page_tokens)
