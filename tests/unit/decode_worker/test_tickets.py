"""Promises, landings and the end of tickets, without an engine."""

import pytest

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


def request(prompt: int, max_tokens: int, emitted: int = 0) -> WorkRequest:
    return WorkRequest("", tuple(range(prompt + emitted)), prompt, Sampling(), max_tokens)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "emitted", "num_pages"),
    [(1, 2, 0, 1), (15, 2, 0, 1), (16, 2, 0, 2), (16, 1, 0, 1), (17, 16, 0, 2), (17, 17, 0, 3), (16, 10, 5, 2)],
)
def test_reserve_promises_all_that_may_come(prompt: int, max_tokens: int, emitted: int, num_pages: int) -> None:
    tickets, pool = table(8)
    tickets.reserve(0, request(prompt, max_tokens, emitted))
    assert pool.counts().promised == num_pages


def test_what_does_not_fit_now_is_refused_and_what_never_fits_is_invalid() -> None:
    tickets, pool = table(4)
    tickets.reserve(0, request(30, 20))
    with pytest.raises(NoCapacity):
        tickets.reserve(0, request(1, 2))
    with pytest.raises(InvalidRequest, match="need 80 tokens, a worker holds 64"):
        tickets.reserve(0, request(60, 20))
    assert pool.counts().promised == 4


def test_a_ticket_runs_when_all_pages_landed_and_its_first_token_is_there() -> None:
    tickets, pool = table(8)
    ticket = tickets.reserve(0, request(40, 10))
    entry = tickets.get(ticket, 0)
    entry.last = Token(0, 7)
    assert tickets.place(entry, PageRun(ticket.counter, 0, 2)) is not None
    assert tickets.running(8) == []
    assert tickets.place(entry, PageRun(ticket.counter, 2, 1)) is not None
    assert tickets.running(8) == [entry]
    assert entry.position == 40
    assert pool.counts().in_use == 3


@pytest.mark.parametrize("run", [PageRun(1, 1, 1), PageRun(1, 0, 4), PageRun(1, 3, 1)])
def test_pages_that_do_not_come_next_are_refused(run: PageRun) -> None:
    tickets, _ = table(8)
    entry = tickets.get(tickets.reserve(0, request(40, 10)), 0)
    assert tickets.place(entry, run) is None


def test_the_page_of_the_next_token_comes_from_the_promise() -> None:
    tickets, pool = table(8)
    entry = tickets.get(tickets.reserve(0, request(15, 20)), 0)
    tickets.place(entry, PageRun(entry.ticket.counter, 0, 1))
    for number in range(19):
        entry.last = Token(number, 7)
        tickets.make_room(entry)
        assert entry.position // 16 < len(entry.page_ids)
    assert entry.num_promised == 0
    pool.check()


def test_drop_frees_everything_once() -> None:
    tickets, pool = table(8)
    entry = tickets.get(tickets.reserve(0, request(40, 10)), 0)
    tickets.place(entry, PageRun(entry.ticket.counter, 0, 3))
    tickets.drop(entry)
    tickets.drop(entry)
    assert pool.counts().free == 8
    assert pool.counts().promised == 0
    with pytest.raises(UnknownTicket):
        tickets.get(entry.ticket, 0)


def test_a_ticket_of_another_incarnation_is_unknown() -> None:
    tickets, _ = table(8)
    ticket = tickets.reserve(0, request(4, 4))
    with pytest.raises(UnknownTicket, match="incarnation old"):
        tickets.get(Ticket(ticket.worker, Incarnation("old"), ticket.counter), 0)
