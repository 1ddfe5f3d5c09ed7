"""Names for whole KV pages: a page's hash covers all tokens up to its end, so equal hashes mean equal KV.

A page is found by its hash only where prefill and decode compute the same KV for the same tokens, which path-invariance
gives. Partly filled pages have no name; and the last token of a prompt is always computed, for its logits.
"""

import hashlib
from array import array
from collections.abc import Sequence

ROOT = b""  # the parent of a sequence's first page


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Of a page that follows the page `parent` and holds `token_ids`."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


def prompt_hashes(token_ids: Sequence[int], page_tokens: int) -> list[bytes]:
    """Of all pages of a prompt that may be taken from a cache: whole ones, at most (length - 1) // page_tokens."""
    hashes: list[bytes] = []
    for end in range(page_tokens, len(token_ids), page_tokens):
        hashes.append(page_hash(hashes[-1] if hashes else ROOT, token_ids[end - page_tokens : end]))
    return hashes
