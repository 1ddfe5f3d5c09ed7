"""The comparison of ledgers: a consistent view has no findings, and every kind of planted mismatch is found."""

import json
from collections.abc import Callable

import pytest

from cluster.audit import Finding, lasting, report, to_plain
from pdserve.v1.cluster_pb2 import GetLedgerResponse, HeldTicket, LedgerEntry, Pages, WorkerLedger


def answer() -> GetLedgerResponse:
    """Two tickets on decode-0, one of them being pushed to by a call on prefill-0."""
    return GetLedgerResponse(
        router="router-a",
        workers=[
            WorkerLedger(
                id="decode-0", role="decode", incarnation="d",
                pages=Pages(total=10, free=4, cached=1, in_use=5, promised=3),
                entries=[
                    LedgerEntry(number=1, label="one", state="running", router="router-a", pages=3, promised=1),
                    LedgerEntry(number=2, label="two", state="landing", router="router-a", pages=2, promised=2),
                ],
            ),
            WorkerLedger(
                id="prefill-0", role="prefill", incarnation="p", pages=Pages(total=10, free=8, in_use=2),
                entries=[
                    LedgerEntry(number=7, label="two", state="pushing", pages=2, ticket_incarnation="d", ticket=2),
                ],
            ),
        ],
        held=[
            HeldTicket(worker="decode-0", incarnation="d", counter=1, label="one"),
            HeldTicket(worker="decode-0", incarnation="d", counter=2, label="two"),
        ],
    )  # fmt: skip


def findings(*answers: GetLedgerResponse) -> list[str]:
    return [str(finding) for finding in lasting([answers])]


def test_views_that_agree_have_no_findings() -> None:
    assert findings(answer()) == []


def forget_the_holder(planted: GetLedgerResponse) -> None:
    del planted.held[0]


def forget_the_ticket(planted: GetLedgerResponse) -> None:
    del planted.workers[0].entries[0]
    planted.workers[0].pages.promised = 2


def replace_the_worker(planted: GetLedgerResponse) -> None:
    planted.held[0].incarnation = "before"


def own_by_somebody_else(planted: GetLedgerResponse) -> None:
    planted.workers[0].entries[0].router = "router-b"
    del planted.held[0]


def push_to_nowhere(planted: GetLedgerResponse) -> None:
    planted.workers[1].entries[0].ticket = 9


def lose_a_page(planted: GetLedgerResponse) -> None:
    planted.workers[1].pages.free = 7


def promise_for_nobody(planted: GetLedgerResponse) -> None:
    planted.workers[0].pages.promised = 4


def promise_too_much(planted: GetLedgerResponse) -> None:
    planted.workers[0].pages.promised = planted.workers[0].entries[1].promised = 9
    planted.workers[0].entries[0].promised = 0


def break_a_rule(planted: GetLedgerResponse) -> None:
    planted.workers[1].problems.append("does not hold: references = holders")


def do_not_answer(planted: GetLedgerResponse) -> None:
    planted.problems.append("decode-1 does not answer")


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (forget_the_holder, ["decode-0: router-a does not hold it any more: ticket 1 (one)"]),
        (forget_the_ticket, ["router-a: decode-0 does not know it: ticket 1 (one)"]),
        (
            replace_the_worker,
            [
                "decode-0: router-a does not hold it any more: ticket 1 (one)",
                "router-a: decode-0 does not know it: ticket 1 (one)",
            ],
        ),
        (
            own_by_somebody_else,
            ["decode-0: router-b owns it, a router that was not asked; name every router by --address: ticket 1 (one)"],
        ),
        (push_to_nowhere, ["prefill-0: pushes to ticket 9, which is not there: call 7 (two)"]),
        (lose_a_page, ["prefill-0: free + cached + in use is not the total: 7 + 0 + 2, 10"]),
        (promise_for_nobody, ["decode-0: promised pages do not add up: 3 by tickets, 4 in all"]),
        (promise_too_much, ["decode-0: more pages are promised than there are"]),
        (break_a_rule, ["prefill-0: does not hold: references = holders"]),
        (do_not_answer, ["decode-1 does not answer"]),
    ],
)
def test_a_planted_mismatch_is_found(plant: Callable[[GetLedgerResponse], None], found: list[str]) -> None:
    planted = answer()
    plant(planted)
    assert findings(planted) == found


def test_two_routers_hold_their_own_tickets_each() -> None:
    one, other = answer(), answer()
    for each in (one, other):
        each.workers[0].entries[1].router = "router-b"
    other.router = "router-b"
    del one.held[1], other.held[0]
    assert findings(one, other) == []
    other.held.pop()
    assert findings(one, other) == ["decode-0: router-b does not hold it any more: ticket 2 (two)"]


def test_a_mismatch_of_a_moment_does_not_count() -> None:
    early, late = answer(), answer()
    forget_the_holder(early)
    early.workers[0].entries[0].number = 5
    forget_the_holder(late)
    assert lasting([[early]]) != []
    assert lasting([[early], [late], [early]]) == []
    assert len(lasting([[late], [late], [late]])) == 1


def test_a_mismatch_lasts_even_where_its_numbers_change() -> None:
    early, late = answer(), answer()
    early.workers[1].pages.free = 7
    late.workers[1].pages.free = 6
    assert [finding.where for finding in lasting([[early], [late]])] == ["prefill-0"]


def test_what_a_worker_says_or_does_not_say_counts_at_once() -> None:
    silent, broken = answer(), answer()
    do_not_answer(silent)
    break_a_rule(broken)
    assert len(lasting([[silent], [broken], [answer()]])) == 2


def test_the_tables_show_pages_holders_and_findings() -> None:
    lines = report([answer()], []).splitlines()
    assert lines[0].split() == ["ID", "ROLE", "HOLDERS", "PAGES", "FREE", "CACHED", "IN", "USE", "PROMISED"]
    assert lines[1].split() == ["decode-0", "decode", "2", "10", "4", "1", "5", "3"]
    assert any(line.split() == ["prefill-0", "7", "pushing", "2", "0", "ticket", "2", "two"] for line in lines)
    assert lines[-1] == "clean: 2 workers, 3 holders"
    assert report([answer()], [Finding("x", "y")]).splitlines()[-2:] == ["x: y", "1 problems: 2 workers, 3 holders"]


def test_json_has_all_of_it() -> None:
    plain = json.loads(json.dumps(to_plain([answer()], [Finding("x", "y")])))
    assert (plain["clean"], plain["problems"]) == (False, ["x: y"])
    (router,) = plain["routers"]
    assert router["workers"][0]["pages"] == {"total": 10, "free": 4, "cached": 1, "in_use": 5, "promised": 3}
    assert router["workers"][1]["entries"][0]["ticket"] == 2
    assert router["held"][1] == {"worker": "decode-0", "incarnation": "d", "counter": 2, "label": "two"}
