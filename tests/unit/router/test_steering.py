"""Penalties, bias and token lists: what is allowed, and what a refusal says."""

from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.request import WorkRequest
from pdserve.steering import Steering
from pdserve.v1 import generation_pb2 as pb
from router.tokenizer import TextModel
from router.validation import ServedModel, plan
from tests.toy_tokenizer import TOY_EOS_ID
from tests.unit.router.test_validation import MODEL


def planned(stopping: pb.Stopping | None = None, **sampling: Any) -> WorkRequest:
    request = pb.GenerateRequest(text="hello", sampling=pb.Sampling(**sampling), stopping=stopping)
    return plan(request, MODEL, "label").work


def test_unset_and_neutral_values_ask_for_nothing() -> None:
    assert planned().steering is None
    assert planned(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0).steering is None


def test_everything_reaches_the_workers() -> None:
    steering = planned(
        repetition_penalty=1.5,
        presence_penalty=2,
        frequency_penalty=-2,
        logit_bias={9: -100, 3: 100},
        allowed_token_ids=[5, 4, 5],
        banned_token_ids=[7],
    ).steering
    assert steering == Steering(1.5, -2.0, 2.0, ((3, 100.0), (9, -100.0)), (4, 5), (7,))


@pytest.mark.parametrize(
    ("sampling", "field", "words"),
    [
        ({"repetition_penalty": 0}, "sampling.repetition_penalty", "0.0625 to 16"),
        ({"repetition_penalty": float("nan")}, "sampling.repetition_penalty", "0.0625 to 16"),
        ({"presence_penalty": 2.1}, "sampling.presence_penalty", "-2 to 2"),
        ({"frequency_penalty": -2.1}, "sampling.frequency_penalty", "-2 to 2"),
        ({"frequency_penalty": float("nan")}, "sampling.frequency_penalty", "-2 to 2"),
        ({"logit_bias": {512: 1}}, "sampling.logit_bias[512]", "0 to 511"),
        ({"logit_bias": {5: 100.5}}, "sampling.logit_bias[5]", "-100 to 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias", "at most 1024"),
        ({"allowed_token_ids": [1, 512]}, "sampling.allowed_token_ids[1]", "0 to 511"),
        ({"allowed_token_ids": [1] * 1025}, "sampling.allowed_token_ids", "at most 1024"),
        ({"banned_token_ids": [600]}, "sampling.banned_token_ids[0]", "0 to 511"),
        ({"banned_token_ids": range(512)}, "sampling.banned_token_ids", "leaves no token"),
        ({"allowed_token_ids": [5], "banned_token_ids": [5]}, "sampling.allowed_token_ids", "leaves no token"),
    ],
)
def test_what_is_not_allowed_is_named(sampling: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        planned(**sampling)
    assert caught.value.field == field
    assert words in caught.value.problem


def test_min_tokens_need_a_token_that_does_not_end_the_completion() -> None:
    assert planned(allowed_token_ids=[TOY_EOS_ID]).steering is not None
    with pytest.raises(InvalidRequest, match="min_tokens"):
        planned(pb.Stopping(min_tokens=1), allowed_token_ids=[TOY_EOS_ID])
    planned(pb.Stopping(min_tokens=1), allowed_token_ids=[TOY_EOS_ID, 5])


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        plan(pb.GenerateRequest(text="hello", **fields), MODEL, "label")
    return caught.value


def test_grammars_reach_the_workers_as_text() -> None:
    for kind, text in (("json_schema", '{"type": "null"}'), ("regex", "é+"), ("lark", 'start: "a"')):
        request = pb.GenerateRequest(text="hello", grammar=pb.Grammar(**{kind: text}))
        steering = plan(request, MODEL, "label").work.steering
        assert steering is not None
        assert steering.grammar is not None
        assert (steering.grammar.kind, steering.grammar.text) == (kind, text)


def test_what_is_no_grammar_is_refused_before_any_worker_is_asked() -> None:
    error = refused(grammar=pb.Grammar(json_schema='{"type": "array", "uniqueItems": true}'))
    assert (error.field, "uniqueItems" in error.problem) == ("grammar.json_schema", True)
    assert refused(grammar=pb.Grammar(regex="(")).field == "grammar.regex"
    assert refused(grammar=pb.Grammar(lark="start: x")).field == "grammar.lark"
    assert "set one of json_schema, regex, lark" in refused(grammar=pb.Grammar()).problem
    assert "65537 bytes; at most 65536" in refused(grammar=pb.Grammar(regex="a" * 65537)).problem


def test_a_model_without_tokenizer_has_no_grammars() -> None:
    bare = ServedModel(MODEL.card, TextModel(), 1000)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), grammar=pb.Grammar(regex="a"))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        plan(request, bare, "label")
