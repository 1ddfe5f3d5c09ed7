"""Which workers take a request: pure functions over what the router knows. Order: liveness, capacity, load.

(Liveness is given: only live workers are asked about.)
"""

from collections.abc import Collection, Sequence

from pdserve.model_card import difference
from pdserve.request import Incarnation
from router.peers import DecodePeer, PrefillPeer

MAX_QUEUED_CHUNKS = 2  # what a prefill worker may have before it; the rest waits where it can still be reordered


def choose_prefill(prefills: Sequence[PrefillPeer], chunk_tokens: int) -> PrefillPeer | None:
    """The least loaded prefill worker, if any has room for more."""
    open_ones = [peer for peer in prefills if peer.queued_tokens <= MAX_QUEUED_CHUNKS * chunk_tokens]
    return min(open_ones, key=lambda peer: (peer.queued_tokens, peer.info.id), default=None)


def choose_decode(
    prefill: PrefillPeer, decodes: Sequence[DecodePeer], full: Collection[Incarnation]
) -> DecodePeer | None:
    """The least loaded decode worker that this prefill worker reaches and that has not just refused."""
    fitting = [
        peer
        for peer in decodes
        if prefill.reaches(peer)
        and peer.info.incarnation not in full
        and not difference(prefill.info.card, peer.info.card)
    ]
    return min(fitting, key=lambda peer: (peer.num_requests, peer.info.id), default=None)
