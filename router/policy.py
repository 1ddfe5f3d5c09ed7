"""Which workers take a request: pure functions over what the router knows. Order: liveness, capacity, load.

Liveness is given: only live workers are asked about. Whether a decode worker has the pages it says itself, at reserve.
"""

from collections.abc import Collection, Sequence

from pdserve.model_card import difference
from pdserve.request import Incarnation
from router.peers import DecodePeer, PrefillPeer

MAX_QUEUED_CHUNKS = 2  # what a prefill worker may have before it; the rest waits where it can still be reordered
MAX_RESUMING = 2  # prompts of resumed requests on a prefill worker: a fault must not starve it of new ones


def open_prefills(prefills: Sequence[PrefillPeer], chunk_tokens: int, *, resumes: bool) -> list[PrefillPeer]:
    """Those that have room for another prompt, the least loaded first."""
    has_room = (
        peer
        for peer in prefills
        if peer.is_open
        and peer.queued_tokens <= MAX_QUEUED_CHUNKS * chunk_tokens
        and not (resumes and peer.client.num_resuming >= MAX_RESUMING)
    )
    return sorted(has_room, key=lambda peer: (peer.queued_tokens, peer.info.id))


def choose(
    prefills: Sequence[PrefillPeer],
    decodes: Sequence[DecodePeer],
    refused: Collection[Incarnation],
) -> tuple[PrefillPeer, DecodePeer] | None:
    """The first prefill worker that reaches a decode worker, and the least loaded one that it reaches."""
    by_load = sorted(decodes, key=lambda peer: (peer.num_requests, peer.info.id))
    pairs = (
        (prefill, decode)
        for prefill in prefills
        for decode in by_load
        if decode.is_open
        and decode.info.incarnation not in refused
        and prefill.reaches(decode)
        and not difference(prefill.info.card, decode.info.card)
    )
    return next(pairs, None)
