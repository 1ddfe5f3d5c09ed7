"""Promises and the end of tickets, without an engine."""

import pytest

from decode_worker.commands import Reserve
from decode_worker.tickets import TicketTable
from engine.pages import PagePool
from pdserve.errors import InvalidRequest, NoCapacity, UnknownTicket
from pdserve.handover import PageRun
from pdserve.model_card import KvLayout
from pdserve.request import Incarnation, Sampling, Ticket, Token, WorkerId, WorkRequest

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="toy")


def table(num_pages: int) -> tuple[TicketTable, PagePool]:
    pool = PagePool(num_pages)
    return TicketTable(WorkerId("decode-0"), Incarnation("inc"), pool, LAYOUT), pool


def asked(prompt: int, max_tokens: int, emitted: int = 0, *, whole: bool = False) -> Reserve:
    request = WorkRequest("", tuple(range(prompt + emitted)), prompt, Sampling(), max_tokens)
    return Reserve(0, 0, request, whole, "router-0")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "emitted", "num_pages", "all_pages"),
    [
        (1, 2, 0, 1, 1),
        (15, 2, 0, 1, 1),
        (16, 2, 0, 2, 2),
        (16, 1, 0, 1, 1),
        (17, 16, 0, 2, 2),
        (17, 17, 0, 3, 3),
        (16, 10, 5, 2, 2),
        (1, 65, 0, 4, 5),
        (16, 200, 0, 5, 14),
        (17, 200, 0, 5, 14),
        (18, 200, 0, 6, 14),
        (16, 200, 50, 9, 14),
    ],
)
def test_promised_are_the_next_64_tokens_or_all(
    prompt: int, max_tokens: int, emitted: int, num_pages: int, all_pages: int
) -> None:
    for whole, expected in ((False, num_pages), (True, all_pages)):
        tickets, pool = table(14)
        tickets.reserve(asked(prompt, max_tokens, emitted, whole=whole))
        assert pool.counts().promised == expected


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    tickets, pool = table(4)
    with pytest.raises(InvalidRequest, match="need 66 tokens, a worker holds 64") as caught:
        tickets.reserve(asked(1, 65))  # its first 64 tokens would fit
    assert caught.value.field == "prompt"
    tickets.reserve(asked(1, 64))
    assert pool.counts().promised == 4


def test_new_work_leaves_a_page_in_fifty_to_what_runs() -> None:
    tickets, pool = table(200)
    tickets.reserve(asked(1, 10))
    pool.promise(200 - 1 - 7)
    with pytest.raises(NoCapacity, match="4 KV pages wanted, 3 of 200 available"):
        tickets.reserve(asked(1, 64))
    assert pool.available == 7, "a refusal changes nothing"
    tickets.reserve(asked(1, 48))
    assert pool.available == 4
    tickets.reserve(asked(1, 64, whole=True))
    assert pool.available == 0, "what is resumed may take all"
    with pytest.raises(NoCapacity):
        tickets.reserve(asked(1, 2, whole=True))


def test_a_small_pool_keeps_one_page_and_gives_all_to_one_that_is_alone() -> None:
    tickets, pool = table(8)
    ticket = tickets.reserve(asked(65, 64))
    assert pool.available == 0
    tickets.drop(tickets.get(ticket, 0))
    tickets.reserve(asked(1, 64))
    with pytest.raises(NoCapacity):
        tickets.reserve(asked(1, 64))
    tickets.reserve(asked(1, 48))
    assert pool.available == 1


def test_a_ticket_runs_when_all_pages_landed_and_its_first_token_is_there() -> None:
    tickets, pool = table(8)
    entry = tickets.get(tickets.reserve(asked(40, 10)), 0)
    entry.adopt(Token(0, 7), 512)
    assert tickets.place(entry, PageRun(1, 0, 2, 0, 2)) == entry.page_ids
    assert tickets.running() == []
    assert tickets.place(entry, PageRun(1, 2, 1, 0, 1)) == entry.page_ids[2:]
    assert tickets.running() == []
    assert tickets.place(entry, PageRun(1, 2, 1, 1, 1)) == entry.page_ids[2:]
    assert tickets.running() == [entry]
    assert entry.position == 40
    assert pool.counts().in_use == 3


def test_without_its_first_token_a_ticket_does_not_run() -> None:
    tickets, _ = table(8)
    entry = tickets.get(tickets.reserve(asked(40, 10)), 0)
    tickets.place(entry, PageRun(1, 0, 3, 0, 2))
    assert tickets.running() == []


def test_the_oldest_run_first() -> None:
    tickets, _ = table(8)
    entries = [tickets.get(tickets.reserve(asked(1, 10)), 0) for _ in range(4)]
    for entry in reversed(entries[1:]):
        entry.adopt(Token(0, 7), 512)
        tickets.place(entry, PageRun(entry.counter, 0, 1, 0, 2))
    assert tickets.running() == entries[1:]


def test_drop_frees_everything_once() -> None:
    tickets, pool = table(8)
    entry = tickets.get(tickets.reserve(asked(40, 30)), 0)
    tickets.place(entry, PageRun(1, 0, 3, 0, 2))
    assert pool.counts().promised == 2
    tickets.drop(entry)
    tickets.drop(entry)
    assert (pool.counts().free, pool.counts().promised) == (8, 0)
    with pytest.raises(UnknownTicket):
        tickets.get(entry.ticket, 0)


def test_a_ticket_of_another_incarnation_is_unknown() -> None:
    tickets, _ = table(8)
    ticket = tickets.reserve(asked(4, 4))
    with pytest.raises(UnknownTicket, match="incarnation old"):
        tickets.get(Ticket(ticket.worker, Incarnation("old"), ticket.counter), 0)
