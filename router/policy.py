"""Which workers take a request: pure functions over what the router knows. Order: liveness, capacity, load.

Liveness is given: only live workers are asked about. Whether a decode worker has the pages it says itself, at reserve.
"""

from collections.abc import Collection, Sequence

from pdserve.model_card import difference
from pdserve.request import Incarnation
from router.peers import DecodePeer, PrefillPeer

MAX_QUEUED_CHUNKS = 2  # what a prefill worker may have before it; the rest waits where it can still be reordered


def open_prefills(prefills: Sequence[PrefillPeer], chunk_tokens: int) -> list[PrefillPeer]:
    """Those that have room for another prompt, the least loaded first."""
    is_open = (peer for peer in prefills if peer.queued_tokens <= MAX_QUEUED_CHUNKS * chunk_tokens)
    return sorted(is_open, key=lambda peer: (peer.queued_tokens, peer.info.id))


def choose(
    prefills: Sequence[PrefillPeer],
    decodes: Sequence[DecodePeer],
    chunk_tokens: int,
    refused: Collection[Incarnation],
) -> tuple[PrefillPeer, DecodePeer] | None:
    """The least loaded open prefill worker that reaches a decode worker, and the least loaded one that it reaches."""
    by_load = sorted(decodes, key=lambda peer: (peer.num_requests, peer.info.id))
    pairs = (
        (prefill, decode)
        for prefill in open_prefills(prefills, chunk_tokens)
        for decode in by_load
        if decode.info.incarnation not in refused
        and prefill.reaches(decode)
        and not difference(prefill.info.card, decode.info.card)
    )
    return next(pairs, None)
