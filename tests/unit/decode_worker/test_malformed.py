"""Malformed input ends its own request, and never the worker."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker.commands import Decode, Landed, Release
from pdserve.errors import InvalidRequest, LegFailed, ProtocolError, UnknownTicket
from pdserve.handover import PageRun
from pdserve.request import Incarnation, Sampling, Token, WorkRequest
from prefill_worker.commands import Start
from prefill_worker.worker import PrefillWorker
from tests.toy import toy_engine
from tests.unit.decode_worker.stage import Slot, Stage, failures, work

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


@pytest.fixture
def stage(stage_of: Callable[[int], Stage]) -> Stage:
    return stage_of(64)


@pytest.mark.parametrize("case", BAD)
def test_requests(stage: Stage, toy_folder: Path, case: str) -> None:
    assert isinstance(stage.outcome(BAD[case]), InvalidRequest)
    prefill = PrefillWorker(toy_engine(toy_folder), chunk_tokens=64, slot_bytes=65536)
    prefill.submit(Start(0, BAD[case]))
    prefill.submit(Start(1, GOOD))
    updates = [prefill.step() for _ in range(8)]
    assert [type(failed.error) for update in updates for failed in update.failed] == [InvalidRequest]
    assert [sampled.call for update in updates for sampled in update.sampled] == [1]


@pytest.mark.parametrize("first", [Token(0, 512), Token(1, 5), Token(3, 5), Token(0, 5, finish="length")])
def test_a_first_token_that_cannot_be_ends_the_ticket(stage: Stage, first: Token) -> None:
    ticket = stage.reserve(GOOD)
    assert failures(stage.step(Decode(0, ticket, first))) == [(ticket.counter, ProtocolError)]
    assert not stage.worker.is_live(ticket.counter)


def test_a_request_of_one_token_is_not_decoded_on(stage: Stage) -> None:
    ticket = stage.reserve(work(16, 1))
    update = stage.step(stage.rest(ticket), Decode(0, ticket, Token(0, 9)))
    assert failures(update) == [(ticket.counter, ProtocolError)]


def test_a_request_of_two_tokens_is_decoded_on(stage: Stage) -> None:
    ticket = stage.reserve(work(16, 2))
    update = stage.step(stage.rest(ticket), Decode(0, ticket, Token(0, 9)))
    assert [emitted.token.finish for emitted in update.emitted] == ["length"]


@pytest.mark.parametrize("number", [0, 2])
def test_a_second_decode_neither_rewinds_nor_skips(stage: Stage, number: int) -> None:
    ticket = stage.start(GOOD)
    assert failures(stage.step(Decode(0, ticket, Token(number, 10)))) == [(ticket.counter, ProtocolError)]


def test_an_unknown_ticket_is_an_error_and_no_silence(stage: Stage) -> None:
    ticket = stage.reserve(GOOD)
    old = replace(ticket, incarnation=Incarnation("old"))
    assert failures(stage.step(Decode(0, old, Token(0, 9)))) == [(ticket.counter, UnknownTicket)]
    assert stage.worker.is_live(ticket.counter)


def test_another_routers_ticket_is_unknown(stage: Stage) -> None:
    ticket = stage.reserve(GOOD)
    update = stage.step(Release(1, ticket), Decode(1, ticket, Token(0, 9)))
    assert failures(update) == [(ticket.counter, UnknownTicket)]
    assert stage.worker.is_live(ticket.counter)
    stage.step(Release(0, ticket), Release(0, ticket))
    assert not stage.worker.is_live(ticket.counter)


@pytest.mark.parametrize(
    ("run", "layers_sent"),
    [
        ((0, 1, 0, 3), 6),  # more bytes than it says
        ((0, 2, 0, 3), 3),  # fewer
        ((0, 1, 0, 2), 3),
        ((0, 2, 0, 3), 6),  # more pages than the prompt has
        ((1, 1, 0, 3), 3),  # not the next page
        ((0, 1, 1, 2), 2),  # not the next layer
        ((0, 1, 0, 4), 4),  # more layers than a page has
        ((0, 0, 0, 0), 0),
    ],
)
def test_payloads_that_do_not_fit(stage: Stage, run: tuple[int, ...], layers_sent: int) -> None:
    ticket = stage.reserve(GOOD)
    slot = Slot(torch.zeros(layers_sent * stage.layout.layer_bytes, dtype=torch.uint8))
    update = stage.step(Landed(PageRun(ticket.counter, *run), slot))
    assert failures(update) == [(ticket.counter, ProtocolError)]
    assert slot.times_back == 1
    assert stage.worker.page_counts().free == stage.worker.page_counts().total


def test_a_wrong_checksum_fails_the_ticket_and_nothing_is_kept(stage: Stage) -> None:
    ticket = stage.reserve(work(40, 10))
    landed = stage.landed(ticket, 0, 3, range(3), crc=123456)
    assert failures(stage.step(landed)) == [(ticket.counter, LegFailed)]
    assert (stage.worker.page_counts().in_use, stage.worker.page_counts().cached) == (0, 0)
    assert isinstance(landed.slot, Slot)
    assert landed.slot.times_back == 1


def test_a_right_checksum_lands(stage: Stage) -> None:
    ticket = stage.reserve(work(40, 10))
    landed = stage.landed(ticket, 0, 3, range(3))
    crc = zlib.crc32(bytes(landed.slot.buffer.numel()))
    assert failures(stage.step(stage.landed(ticket, 0, 3, range(3), crc))) == []
    assert stage.entry(ticket).landing.is_complete


def test_a_payload_of_a_dead_ticket_is_dropped(stage: Stage) -> None:
    ticket = stage.reserve(GOOD)
    landed = stage.rest(ticket)
    update = stage.step(Release(0, ticket), landed)
    assert not update.failed
    assert isinstance(landed.slot, Slot)
    assert landed.slot.times_back == 1
