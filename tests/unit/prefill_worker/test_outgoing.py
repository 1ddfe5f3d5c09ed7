"""What is packed when: complete pages, groups of layers of those under way, nothing that decode holds already."""

import pytest

from pdserve.handover import PageRun
from pdserve.model_card import KvLayout
from pdserve.request import Incarnation, Ticket, WorkerId
from prefill_worker.outgoing import Outgoing, Ready, group_size

LAYOUT = KvLayout(num_layers=6, num_kv_heads=1, head_dim=16, page_tokens=16, dtype="float32", page_format="toy")
SLOT_BYTES = 4 * LAYOUT.page_bytes
Run = tuple[int, int, int, int]


def outgoing(num_tokens: int, cached_pages: int = 0) -> Outgoing:
    ticket = Ticket(WorkerId("decode-0"), Incarnation("inc"), 3, cached_pages)
    return Outgoing(ticket, None, LAYOUT, SLOT_BYTES, LAYOUT.pages_for(num_tokens))  # type: ignore[arg-type]


def drain(push: Outgoing, ready: Ready) -> list[Run]:
    runs = []
    while run := push.next_run(ready):
        push.packed(run)
        runs.append((run.first_page, run.num_pages, run.first_layer, run.num_layers))
        assert run.num_pages * run.num_layers * LAYOUT.layer_bytes <= SLOT_BYTES
    return runs


@pytest.mark.parametrize(("num_pages", "group"), [(0, 6), (1, 6), (4, 6), (5, 3), (8, 3), (9, 2), (13, 1), (500, 1)])
def test_groups_are_even_and_fit_a_slot(num_pages: int, group: int) -> None:
    assert group_size(num_pages, LAYOUT, SLOT_BYTES) == group


def test_a_short_prompt_is_one_payload() -> None:
    push = outgoing(60)
    assert drain(push, Ready(0, 4, num_layers=5)) == []
    assert drain(push, Ready(4)) == [(0, 4, 0, 6)]
    assert push.is_packed
    assert not push.is_landed
    push.num_flying = 0
    assert push.is_landed
    assert push.kv_bytes == 4 * LAYOUT.page_bytes


def test_a_long_chunk_goes_by_groups_of_layers_while_it_is_computed() -> None:
    push = outgoing(200)  # 13 pages, the last one partly filled
    assert drain(push, Ready(0, 8, num_layers=2)) == []
    assert drain(push, Ready(0, 8, num_layers=4)) == [(0, 8, 0, 3)]
    assert drain(push, Ready(8, 13, num_layers=0)) == [(0, 8, 3, 3)]
    assert drain(push, Ready(8, 13, num_layers=3)) == [(8, 5, 0, 3)]
    assert drain(push, Ready(13)) == [(8, 5, 3, 3)]
    assert push.is_packed
    assert (push.num_payloads, push.num_flying, push.kv_bytes) == (4, 4, 13 * LAYOUT.page_bytes)


def test_what_has_piled_up_goes_in_whole_slots() -> None:
    push = outgoing(170)
    assert drain(push, Ready(5, 11, num_layers=3)) == [(0, 4, 0, 6), (4, 1, 0, 6), (5, 6, 0, 3)]
    assert drain(push, Ready(11)) == [(5, 6, 3, 3)]


@pytest.mark.parametrize("cached_pages", [1, 4, 9])
def test_what_decode_holds_is_not_pushed(cached_pages: int) -> None:
    push = outgoing(150, cached_pages)
    assert drain(push, Ready(cached_pages)) == []
    assert {first for first, *_ in drain(push, Ready(10))} >= {cached_pages}
    assert push.kv_bytes == (10 - cached_pages) * LAYOUT.page_bytes
    assert push.is_packed


def test_meta_names_ticket_pages_and_layers() -> None:
    run = outgoing(100).next_run(Ready(4))
    assert run == PageRun(3, 0, 4, 0, 6)
    assert PageRun.unpack(run.pack()) == run
