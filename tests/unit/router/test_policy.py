"""Who gets a request: the least loaded pair that is linked."""

from pdserve.internal.v1 import worker_pb2
from pdserve.membership import Role, WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from pdserve.v1 import cluster_pb2
from router.peers import DecodePeer, PrefillPeer
from router.policy import TOKENS_PER_REQUEST, Known, choose, open_prefills
from router.rank import QueuedPrompt, QueuedPrompts, Rank

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_tokens=16, dtype="float32", page_format="toy")


NEW, RESUMED, LAST = Rank(0, True, 0, 0), Rank(0, False, 0, 0), Rank(9, True, 9, 9)


class Client:
    """What the policy reads of a client: one prompt, or `load` tickets."""

    def __init__(self, load: int, rank: Rank = NEW) -> None:
        self.queued = QueuedPrompts()
        self.queued.add(QueuedPrompt(rank, load))
        self.num_tickets = load


def info(id: str, role: Role, model: str = "f") -> WorkerInfo:
    card = ModelCard("toy", 512, 512, (2,), model, LAYOUT, exact=True)
    return WorkerInfo(WorkerId(id), role, Incarnation(f"{id}!"), "", 1, card)


def prefill(id: str, load: int, *linked: str, rank: Rank = NEW) -> PrefillPeer:
    beat = worker_pb2.WatchResponse(linked=[f"{each}!" for each in linked])
    return PrefillPeer(info(id, "prefill"), Client(load, rank), beat)  # type: ignore[arg-type]


def decode(id: str, load: int, model: str = "f") -> DecodePeer:
    return DecodePeer(info(id, "decode", model), Client(load), worker_pb2.WatchResponse())  # type: ignore[arg-type]


def nothing(_: Incarnation) -> int:
    return 0


def opened(prefills: list[PrefillPeer], known: Known = nothing, rank: Rank = LAST) -> list[str]:
    return [peer.info.id for peer in open_prefills(prefills, 256, known, rank)]


def ids(pair: tuple[PrefillPeer, DecodePeer] | None) -> tuple[str, str] | None:
    return pair and (pair[0].info.id, pair[1].info.id)


def test_the_least_loaded_of_each() -> None:
    prefills = [prefill("p0", 300, "d0", "d1"), prefill("p1", 20, "d0", "d1")]
    assert opened(prefills) == ["p1", "p0"]
    assert ids(choose(prefills, [decode("d0", 4), decode("d1", 3)], nothing, ())) == ("p0", "d1")


def test_a_prefill_worker_without_links_is_passed_over() -> None:
    prefills = [prefill("p0", 0), prefill("p1", 500, "d0")]
    assert ids(choose(prefills, [decode("d0", 4)], nothing, ())) == ("p1", "d0")


def test_whoever_refused_is_passed_over() -> None:
    prefills = [prefill("p0", 0, "d0"), prefill("p1", 10, "d0", "d1")]
    assert ids(choose(prefills, [decode("d0", 0), decode("d1", 9)], nothing, {Incarnation("d0!")})) == ("p1", "d1")


def test_two_chunk_budgets_are_enough() -> None:
    assert opened([prefill("a", 512), prefill("b", 513)]) == ["a"]


def test_what_is_computed_later_takes_no_room_but_among_equals_the_idle_one_is_first() -> None:
    long = Rank(0, True, 100, 1)
    prefills = [prefill("a", 2000, rank=long), prefill("b", 513, rank=long), prefill("c", 512, rank=long)]
    assert opened(prefills, rank=Rank(0, True, 101, 0)) == ["c"]
    assert opened(prefills, rank=Rank(0, True, 99, 2)) == opened(prefills, rank=long) == ["c", "b", "a"]
    assert opened(prefills, rank=Rank(-1, True, 999, 2)) == ["c", "b", "a"], "more urgent"
    assert opened(prefills, rank=Rank(0, False, 999, 2)) == ["c", "b", "a"], "it was at work already"
    prefills[2].others = 600
    assert opened(prefills, rank=long) == ["b", "a"], "what others sent there counts in any case"


def test_only_two_resumed_prompts_at_a_time_on_a_prefill_worker() -> None:
    busy, free = prefill("a", 0, rank=RESUMED), prefill("b", 0, rank=RESUMED)
    busy.client.queued.add(QueuedPrompt(RESUMED, 0))
    assert opened([busy, free], rank=RESUMED) == ["b"]
    assert opened([busy, free]) == ["a", "b"]


def test_who_is_draining_gets_nothing_new() -> None:
    leaving, staying = prefill("a", 0, "d0", "d1"), prefill("b", 9, "d0", "d1")
    leaving.beat.draining = True
    assert opened([leaving, staying]) == ["b"]
    decodes = [decode("d0", 0), decode("d1", 9)]
    decodes[0].beat.draining = True
    assert ids(choose([staying], decodes, nothing, ())) == ("b", "d1")


def test_another_model_is_no_pair() -> None:
    assert choose([prefill("p0", 0, "d0")], [decode("d0", 0, model="g")], nothing, ()) is None


def test_what_others_queued_counts_and_what_we_had_queued_at_the_beat_does_not() -> None:
    peer = prefill("p0", 100)
    peer.take(worker_pb2.WatchResponse(load=cluster_pb2.Load(queued_tokens=350)))
    assert peer.queued_tokens == 350
    peer.client.queued = QueuedPrompts()
    assert peer.queued_tokens == peer.tokens_before(LAST) == 250


def test_a_known_prefix_is_work_that_is_done_already() -> None:
    known = {Incarnation("p1!"): 100, Incarnation("d1!"): 2 * TOKENS_PER_REQUEST}
    prefills = [prefill("p0", 0, "d0", "d1"), prefill("p1", 99, "d0", "d1")]
    assert opened(prefills, lambda each: known.get(each, 0)) == ["p1", "p0"]
    prefills[1].client.queued.add(QueuedPrompt(NEW, 2))
    assert opened(prefills, lambda each: known.get(each, 0)) == ["p0", "p1"]
    decodes = [decode("d0", 1), decode("d1", 2)]
    assert ids(choose(prefills, decodes, lambda each: known.get(each, 0), ())) == ("p0", "d1")
    decodes[1] = decode("d1", 4)
    assert ids(choose(prefills, decodes, lambda each: known.get(each, 0), ())) == ("p0", "d0")


def test_affinity_never_beats_capacity() -> None:
    prefills = [prefill("p0", 0), prefill("p1", 513)]
    assert opened(prefills, lambda each: 10_000 if each == "p1!" else 0) == ["p0"]
