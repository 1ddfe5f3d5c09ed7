"""Which workers take a request: pure functions over what the router knows. Order: liveness, capacity, affinity.

Liveness is given: only live workers are asked about. Whether a decode worker has the pages it says itself, at reserve.
Affinity counts in the same coin as load: a worker that knows a prefix has that much less to do.
"""

from collections.abc import Callable, Collection, Sequence

from pdserve.model_card import difference
from pdserve.request import Incarnation
from router.peers import DecodePeer, PrefillPeer
from router.rank import Rank

MAX_QUEUED_CHUNKS = 2  # what a prefill worker may compute before it; who has to wait longer takes no decode pages yet
MAX_RESUMING = 2  # prompts of resumed requests on a prefill worker: a fault must not starve it of new ones
TOKENS_PER_REQUEST = 256  # known tokens for which a decode worker may have one more request than others

Known = Callable[[Incarnation], int]  # tokens at the beginning of the prompt that a worker has probably kept


def open_prefills(prefills: Sequence[PrefillPeer], chunk_tokens: int, known: Known, rank: Rank) -> list[PrefillPeer]:
    """Those that would soon come to a prompt of this rank; first the one that would be through with it first.

    What the worker computes after it does not count: so a short prompt is not stuck behind long ones.
    """

    def load(peer: PrefillPeer) -> tuple[int, int, str]:
        return peer.tokens_before(rank) - known(peer.info.incarnation), peer.queued_tokens, peer.info.id

    has_room = (
        peer
        for peer in prefills
        if peer.is_open
        and peer.tokens_before(rank) <= MAX_QUEUED_CHUNKS * chunk_tokens
        and (rank.is_new or peer.client.queued.num_resuming < MAX_RESUMING)
    )
    return sorted(has_room, key=load)


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
