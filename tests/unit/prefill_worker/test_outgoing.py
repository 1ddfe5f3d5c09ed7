"""When pages are packed: a slot's worth at a time, the rest when the prompt is complete."""

import pytest

from pdserve.handover import PageRun
from pdserve.model_card import KvLayout
from pdserve.request import Incarnation, Ticket, WorkerId
from prefill_worker.outgoing import Outgoing

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="toy")
TICKET = Ticket(WorkerId("decode-0"), Incarnation("inc"), 3)


def outgoing(num_tokens: int) -> Outgoing:
    return Outgoing(TICKET, None, LAYOUT, pages_per_payload=4, num_pages=LAYOUT.pages_for(num_tokens))  # type: ignore[arg-type]


def drain(push: Outgoing, num_computed: int, is_computed: bool) -> list[tuple[int, int]]:
    runs = []
    while run := push.next_run(num_computed, is_computed):
        push.packed(run)
        runs.append((run.first_page, run.num_pages))
    return runs


def test_whole_payloads_go_while_the_prompt_is_computed() -> None:
    push = outgoing(170)  # 11 pages, the last one partly filled
    assert drain(push, 63, is_computed=False) == []
    assert drain(push, 64, is_computed=False) == [(0, 4)]
    assert drain(push, 169, is_computed=False) == [(4, 4)]
    assert drain(push, 170, is_computed=True) == [(8, 3)]
    assert push.is_packed
    assert not push.is_landed
    push.num_flying = 0
    assert push.is_landed
    assert push.kv_bytes == 11 * LAYOUT.page_bytes


@pytest.mark.parametrize(
    ("num_tokens", "runs"), [(1, [(0, 1)]), (16, [(0, 1)]), (17, [(0, 2)]), (64, [(0, 4)]), (65, [(0, 4), (4, 1)])]
)
def test_a_short_prompt_is_one_payload(num_tokens: int, runs: list[tuple[int, int]]) -> None:
    assert drain(outgoing(num_tokens), num_tokens, is_computed=True) == runs


def test_meta_names_ticket_and_pages() -> None:
    run = outgoing(100).next_run(64, is_computed=False)
    assert run == PageRun(3, 0, 4, 0, run.num_layers)
    assert run is not None
    assert PageRun.unpack(run.pack()) == run
