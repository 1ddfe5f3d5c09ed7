"""Requests and tokens come back from the wire as they went."""

from dataclasses import replace

import pytest

from pdserve.internal.v1 import worker_pb2
from pdserve.request import Candidate, Sampling, Scored, Token, WorkRequest
from pdserve.steering import Grammar, Steering
from pdserve.wire import (
    request_from_wire,
    request_to_wire,
    scored_from_wire,
    scored_to_wire,
    token_from_wire,
    token_to_wire,
)

PLAIN = WorkRequest("r", (5, 6), 1, Sampling(0.5, 3, 0.9, 0.1, 2**64 - 1), 9, 2, frozenset({7, 1}), 20)
STEERED = WorkRequest(
    "r",
    (5,),
    1,
    Sampling(),
    9,
    steering=Steering(1.1, 0.2, -0.3, ((1, 0.5), (7, -2.0)), (1, 2, 3), (4,), Grammar("regex", "é+")),
)


SCORED = replace(PLAIN, logprobs=True, logprobs_as_drawn=True, prompt_logprobs=0)
TOP = (Candidate(1, -0.5), Candidate(2, -1.5))


@pytest.mark.parametrize("work", [PLAIN, STEERED, SCORED])
def test_requests(work: WorkRequest) -> None:
    raw = request_to_wire(work).SerializeToString()
    assert request_from_wire(worker_pb2.WorkRequest.FromString(raw)) == work


@pytest.mark.parametrize("token", [Token(3, 9), Token(0, 1, TOP, "length"), Token(0, 1, logprob=0.0)])
def test_tokens(token: Token) -> None:
    assert token_from_wire(worker_pb2.Token.FromString(token_to_wire(token).SerializeToString())) == token


def test_scores() -> None:
    scored = Scored(Candidate(7, -3.5), TOP)
    assert scored_from_wire(worker_pb2.Scored.FromString(scored_to_wire(scored).SerializeToString())) == scored
