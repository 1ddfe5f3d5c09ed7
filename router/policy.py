"""Which workers take a request: pure functions over what the router knows. Order: liveness, capacity, affinity.

Liveness is given: only live workers are asked about. Whether a decode worker has the pages it says itself, at reserve.
Affinity counts in the same coin as load: a worker that knows a prefix has that much less to do.
"""

from collections.abc import Callable, Collection, Sequence

from pdserve.model_card import difference
from pdserve.request import Incarnation
from router.peers import DecodePeer, PrefillPeer

MAX_QUEUED_CHUNKS = 2  # what a prefill worker may have before it; the rest waits where it can still be reordered
MAX_RESUMING = 2  # prompts of resumed requests on a prefill worker: a fault must not starve it of new ones
TOKENS_PER_REQUEST = 256  # known tokens for which a decode worker may have one more request than others

Known = Callable[[Incarnation], int]  # tokens at the beginning of the prompt that a worker has probably kept


def open_prefills(
    prefills: Sequence[PrefillPeer], chunk_tokens: int, known: Known, *, resumes: bool
) -> list[PrefillPeer]:
    """Those that have room for another prompt; first the one that would be through with it first."""
    has_room = (
        peer
        for peer in prefills
        if peer.is_open
        and peer.queued_tokens <= MAX_QUEUED_CHUNKS * chunk_tokens
        and not (resumes and peer.client.num_resuming >= MAX_RESUMING)
    )
    return sorted(has_room, key=lambda peer: (peer.queued_tokens - known(peer.info.incarnation), peer.info.id))


def choose(
    prefills: Sequence[PrefillPeer],
    decodes: Sequence[DecodePeer],
    known: Known,
    refused: Collection[Incarnation],
) -> tuple[PrefillPeer, DecodePeer] | None:
    """The first prefill worker that reaches a decode worker, and the least loaded one that it reaches."""

    def load(peer: DecodePeer) -> tuple[float, str]:
        return peer.num_requests - known(peer.info.incarnation) / TOKENS_PER_REQUEST, peer.info.id

    by_load = sorted(decodes, key=load)
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
