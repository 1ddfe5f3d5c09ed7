"""Malformed input ends its own request, and never the worker."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker.commands import Decode, Landed, Release, Reserve
from decode_worker.worker import DecodeWorker
from pdserve.errors import InvalidRequest, ProtocolError, UnknownTicket
from pdserve.handover import PageRun
from pdserve.request import Incarnation, Sampling, Ticket, Token, WorkerId, WorkRequest
from prefill_worker.commands import Start
from prefill_worker.worker import PrefillWorker
from tests.toy import toy_engine, write_toy_model

GOOD = WorkRequest("", (5, 6, 7), 3, Sampling(), max_tokens=4)
BAD = {
    "empty prompt": replace(GOOD, token_ids=(), prompt_length=0),
    "prompt length 0": replace(GOOD, prompt_length=0),
    "prompt longer than its tokens": replace(GOOD, prompt_length=4),
    "token outside the vocabulary": replace(GOOD, token_ids=(5, 512, 7)),
    "nothing left to emit": replace(GOOD, prompt_length=1, max_tokens=2),
    "beyond the window": replace(GOOD, max_tokens=510),
    "temperature": replace(GOOD, sampling=Sampling(temperature=float("nan"))),
    "top_p": replace(GOOD, sampling=Sampling(top_p=0.0)),
    "min_p": replace(GOOD, sampling=Sampling(min_p=1.5)),
}


class Slot:
    def __init__(self, num_bytes: int) -> None:
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.is_back = False

    def give_back(self) -> None:
        self.is_back = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def worker(folder: Path) -> DecodeWorker:
    return DecodeWorker(toy_engine(folder), WorkerId("decode-0"), Incarnation("inc"), max_batch=8)


def reserved(worker: DecodeWorker) -> Ticket:
    worker.submit(Reserve(0, 0, GOOD))
    outcome = worker.step().reserved[0].outcome
    assert isinstance(outcome, Ticket)
    return outcome


@pytest.mark.parametrize("case", BAD)
def test_requests(worker: DecodeWorker, folder: Path, case: str) -> None:
    worker.submit(Reserve(0, 0, BAD[case]))
    assert isinstance(worker.step().reserved[0].outcome, InvalidRequest)
    prefill = PrefillWorker(toy_engine(folder), chunk_tokens=64, slot_bytes=65536)
    prefill.submit(Start(0, BAD[case]))
    prefill.submit(Start(1, GOOD))
    update = prefill.step()
    assert [type(failed.error) for failed in update.failed] == [InvalidRequest]
    assert [sampled.call for sampled in update.sampled] == [1]


@pytest.mark.parametrize("first", [Token(0, 512), Token(1, 5)])
def test_a_first_token_that_cannot_be(worker: DecodeWorker, first: Token) -> None:
    ticket = reserved(worker)
    worker.submit(Decode(0, ticket, first))
    assert isinstance(worker.step().failed[0].error, ProtocolError)


def test_a_second_decode_does_not_rewind(worker: DecodeWorker) -> None:
    ticket = reserved(worker)
    worker.submit(Decode(0, ticket, Token(0, 9)))
    worker.submit(Decode(0, ticket, Token(0, 10)))
    assert isinstance(worker.step().failed[0].error, ProtocolError)


def test_an_unknown_ticket_is_an_error_and_no_silence(worker: DecodeWorker) -> None:
    ticket = replace(reserved(worker), incarnation=Incarnation("old"))
    worker.submit(Decode(0, ticket, Token(0, 9)))
    assert isinstance(worker.step().failed[0].error, UnknownTicket)


@pytest.mark.parametrize(("run", "pages"), [((0, 1), 2), ((0, 2), 1), ((0, 2), 2), ((1, 1), 1)])
def test_payloads_that_do_not_fit(worker: DecodeWorker, run: tuple[int, int], pages: int) -> None:
    ticket, slot = reserved(worker), Slot(pages * worker._engine.card.kv_layout.page_bytes)
    worker.submit(Landed(PageRun(ticket.counter, *run), slot))
    assert isinstance(worker.step().failed[0].error, ProtocolError)
    assert slot.is_back
    assert worker.page_counts().free == worker.page_counts().total


@pytest.mark.parametrize("first", [Token(0, 5, finish="length"), Token(3, 5)])
def test_a_first_token_that_ends_the_request_is_not_decoded_on(worker: DecodeWorker, first: Token) -> None:
    ticket = reserved(worker)
    worker.submit(Decode(0, ticket, first))
    assert isinstance(worker.step().failed[0].error, ProtocolError)


def test_a_request_of_one_token_is_not_decoded_on(worker: DecodeWorker) -> None:
    one = WorkRequest("", tuple(range(3, 19)), 16, Sampling(), max_tokens=1)
    worker.submit(Reserve(0, 0, one))
    ticket = worker.step().reserved[0].outcome
    assert isinstance(ticket, Ticket)
    worker.submit(Landed(PageRun(ticket.counter, 0, 1), Slot(worker._engine.card.kv_layout.page_bytes)))
    worker.submit(Decode(0, ticket, Token(0, 9)))
    assert isinstance(worker.step().failed[0].error, ProtocolError)


def test_another_routers_ticket_is_unknown(worker: DecodeWorker) -> None:
    ticket = reserved(worker)
    worker.submit(Release(1, ticket))
    worker.submit(Decode(1, ticket, Token(0, 9)))
    assert isinstance(worker.step().failed[0].error, UnknownTicket)
    assert worker.is_live(ticket.counter)
    worker.submit(Release(0, ticket))
    worker.step()
    assert not worker.is_live(ticket.counter)
