"""Bad input is refused with its field and the allowed range; everything else gets the documented defaults."""

import math
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.model_card import KvLayout, ModelCard
from pdserve.v1 import generation_pb2 as pb
from router.tokenizer import TextModel
from router.validation import Plan, ServedModel, plan
from tests.toy_tokenizer import TOY_EOS_ID, TOY_VOCAB_SIZE, toy_tokenizer, write_toy_tokenizer

WINDOW = 64
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="plain")
CARD = ModelCard("toy", TOY_VOCAB_SIZE, WINDOW, (0, TOY_EOS_ID), "f00d", LAYOUT, exact=True)
MODEL = ServedModel(CARD, TextModel(toy_tokenizer()), max_request_tokens=1000)


def planned(model: ServedModel = MODEL, **fields: Any) -> Plan:
    fields = fields if fields.keys() & {"text", "chat", "token_ids"} else {"text": "hello", **fields}
    return plan(pb.GenerateRequest(**fields), model, "label")


def refusal(model: ServedModel = MODEL, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        planned(model, **fields)
    return caught.value


def ids(count: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[7] * count)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"text": ""}, "text", "at least one token"),
        ({"token_ids": ids(0)}, "token_ids.ids", "at least one token"),
        ({"token_ids": pb.TokenIds(ids=[1, 512])}, "token_ids.ids[1]", "0 to 511"),
        ({"chat": pb.Chat()}, "chat.messages", "at least one"),
        ({"sampling": pb.Sampling(temperature=-0.1)}, "sampling.temperature", "-0.1 is not allowed; must be 0 to 100"),
        ({"sampling": pb.Sampling(temperature=100.5)}, "sampling.temperature", "0 to 100"),
        ({"sampling": pb.Sampling(temperature=math.nan)}, "sampling.temperature", "nan"),
        ({"sampling": pb.Sampling(temperature=math.inf)}, "sampling.temperature", "inf"),
        ({"sampling": pb.Sampling(top_p=0)}, "sampling.top_p", "more than 0, and at most 1"),
        ({"sampling": pb.Sampling(top_p=1.01)}, "sampling.top_p", "at most 1"),
        ({"sampling": pb.Sampling(top_p=math.nan)}, "sampling.top_p", "at most 1"),
        ({"sampling": pb.Sampling(min_p=-0.5)}, "sampling.min_p", "0 to 1"),
        ({"sampling": pb.Sampling(min_p=1.5)}, "sampling.min_p", "0 to 1"),
        ({"sampling": pb.Sampling(min_p=math.nan)}, "sampling.min_p", "0 to 1"),
        ({"sampling": pb.Sampling(top_k=-1)}, "sampling.top_k", "at least 0"),
        ({"stopping": pb.Stopping(max_tokens=0)}, "stopping.max_tokens", "at least 1"),
        ({"stopping": pb.Stopping(max_tokens=-5)}, "stopping.max_tokens", "at least 1"),
        ({"stopping": pb.Stopping(min_tokens=-1)}, "stopping.min_tokens", "0 to 256"),
        ({"stopping": pb.Stopping(max_tokens=4, min_tokens=5)}, "stopping.min_tokens", "0 to 4"),
        ({"stopping": pb.Stopping(stop=["x"] * 17)}, "stopping.stop", "at most 16"),
        ({"stopping": pb.Stopping(stop=["x", ""])}, "stopping.stop[1]", "1 to 256"),
        ({"stopping": pb.Stopping(stop=["é" * 257])}, "stopping.stop[0]", "1 to 256"),
        ({"stopping": pb.Stopping(stop_token_ids=[1] * 129)}, "stopping.stop_token_ids", "at most 128"),
        ({"stopping": pb.Stopping(stop_token_ids=[512])}, "stopping.stop_token_ids[0]", "0 to 511"),
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"top_logprobs": -1}, "top_logprobs", "0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0 to 20"),
        ({"logprobs_stage": 7}, "logprobs_stage", "LOGPROBS_STAGE_DRAWN"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"truncate_prompt_tokens": -3}, "truncate_prompt_tokens", "at least 1"),
        ({"token_ids": ids(WINDOW)}, "token_ids.ids", "has 64 tokens, but the context window of 64"),
        ({"token_ids": ids(70), "truncate_prompt_tokens": 64}, "token_ids.ids", "has 64 tokens"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field_and_the_range(fields: dict[str, Any], field: str, words: str) -> None:
    error = refusal(**fields)
    assert error.field == field
    assert words in error.problem


def test_a_prompt_must_be_set() -> None:
    with pytest.raises(InvalidRequest, match="text, token_ids, chat"):
        plan(pb.GenerateRequest(), MODEL, "label")


def test_labels_are_short() -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        plan(pb.GenerateRequest(text="x"), MODEL, "x" * 257)


def test_chat_needs_a_template_and_known_roles(tmp_path: Path) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert refusal(chat=chat).field == "chat"
    write_toy_tokenizer(tmp_path)
    model = ServedModel(CARD, TextModel.load(tmp_path), 1000)
    assert planned(model, chat=chat).work.token_ids[0] == 1
    chat.messages.add(role="tool", content="x")
    error = refusal(model, chat=chat)
    assert error.field == "chat.messages[1].role"
    assert "system, user, assistant" in error.problem


def test_a_model_without_tokenizer_takes_ids_only() -> None:
    model = ServedModel(CARD, TextModel(), 1000)
    assert planned(model, token_ids=ids(3)).work.token_ids == (7, 7, 7)
    assert refusal(model, text="hello").field == "prompt"
    assert refusal(model, token_ids=ids(3), stopping=pb.Stopping(stop=["x"])).field == "stopping.stop"


def test_defaults() -> None:
    got = planned()
    work = got.work
    assert (work.sampling.temperature, work.sampling.top_k, work.sampling.top_p, work.sampling.min_p) == (1, 0, 1, 0)
    assert 0 <= work.sampling.seed < 2**63
    assert planned().work.sampling.seed != work.sampling.seed
    assert (work.min_tokens, work.top_logprobs, got.priority, got.stop) == (0, 0, 0, ())
    assert work.prompt_length == len(work.token_ids) == len(MODEL.text.encode("hello"))
    assert work.stop_token_ids == got.eos_token_ids == {0, TOY_EOS_ID}
    assert planned(ServedModel(_card(window=1000), MODEL.text, 1000)).work.max_tokens == 256


def test_values_whose_zero_means_something_are_kept() -> None:
    sampling = pb.Sampling(temperature=0, top_k=0, min_p=0, seed=0)
    got = planned(sampling=sampling, priority=-2, top_logprobs=20)
    assert (got.work.sampling.temperature, got.work.sampling.seed) == (0, 0)
    assert (got.priority, got.work.top_logprobs) == (-2, 20)
    assert planned(sampling=pb.Sampling(seed=2**64 - 1)).work.sampling.seed == 2**64 - 1


def test_eos_and_stop_tokens() -> None:
    assert planned(stopping=pb.Stopping(ignore_eos=True)).work.stop_token_ids == frozenset()
    got = planned(stopping=pb.Stopping(ignore_eos=True, stop_token_ids=[9, 0], stop=["a", "b"]))
    assert got.work.stop_token_ids == {9, 0}
    assert not got.eos_token_ids
    assert got.stop == ("a", "b")
    assert planned(stopping=pb.Stopping(stop_token_ids=[9])).work.stop_token_ids == {0, 2, 9}


def test_the_window_limits_the_completion() -> None:
    got = planned(token_ids=ids(60), stopping=pb.Stopping(max_tokens=5, min_tokens=5))
    assert (got.work.max_tokens, got.work.min_tokens, got.window_limited, got.window) == (4, 4, True, WINDOW)
    got = planned(token_ids=ids(60), stopping=pb.Stopping(max_tokens=4))
    assert (got.work.max_tokens, got.window_limited) == (4, False)
    assert planned(token_ids=ids(WINDOW - 1)).work.max_tokens == 1


def test_truncation_keeps_the_last_tokens() -> None:
    prompt = pb.TokenIds(ids=range(100))
    got = planned(token_ids=prompt, truncate_prompt_tokens=3).work
    assert (got.token_ids, got.prompt_length) == ((97, 98, 99), 3)
    assert planned(token_ids=ids(2), truncate_prompt_tokens=3).work.token_ids == (7, 7)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    model = ServedModel(CARD, MODEL.text, max_request_tokens=32)
    error = refusal(model, token_ids=ids(20), stopping=pb.Stopping(max_tokens=13))
    assert (error.field, error.problem.endswith("must be 1 to 12 for this prompt")) == ("stopping.max_tokens", True)
    assert planned(model, token_ids=ids(20), stopping=pb.Stopping(max_tokens=12)).work.max_length == 32
    error = refusal(model, token_ids=ids(32), stopping=pb.Stopping(max_tokens=1))
    assert (error.field, "at most 31" in error.problem) == ("prompt", True)


def _card(window: int) -> ModelCard:
    return ModelCard("toy", TOY_VOCAB_SIZE, window, (0, TOY_EOS_ID), "f00d", LAYOUT, exact=True)


def test_log_probabilities_are_asked_for_in_three_ways() -> None:
    none = planned().work
    assert (none.wants_logprobs, none.prompt_logprobs, none.logprobs_as_drawn) == (False, None, False)
    chosen = planned(logprobs=True, prompt_logprobs=0, logprobs_stage=pb.LOGPROBS_STAGE_DRAWN).work
    assert (chosen.wants_logprobs, chosen.prompt_logprobs, chosen.logprobs_as_drawn) == (True, 0, True)
    assert planned(top_logprobs=1).work.wants_logprobs
