"""Every control through a whole cluster, against transformers where it has it, and from where a client was cut off."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import jsonschema
import pytest
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from transformers import LlamaForCausalLM, SequenceBiasLogitsProcessor

from engine.load import Engine
from pdserve.request import WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.tokenizer import TextModel
from router.validation import ServedModel, plan
from tests.e2e.harness import Answer, Cluster, token_request
from tests.inprocess import reference
from tests.json_schemas import random_schema
from tests.structured import BIAS, TOKENIZER
from tests.toy import toy_engine

PROMPT = [(7 * i * i + 13 * i) % 500 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def engine(toy_folder: Path) -> Engine:
    return toy_engine(toy_folder)


@pytest.fixture(scope="module")
def model(toy_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(toy_folder, dtype=torch.float32).eval()


def asked(sampling: dict[str, Any], **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.Sampling(**sampling), **fields)


def as_work(request: pb.GenerateRequest, engine: Engine, folder: Path) -> WorkRequest:
    """What the router makes of it."""
    return plan(request, ServedModel(engine.card, TextModel.load(folder), 10_000), "label").work


def resumed(request: pb.GenerateRequest, whole: Answer, received: int) -> pb.GenerateRequest:
    assert whole.started is not None
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.resume.token_ids.extend(whole.token_ids[:received])
    again.resume.seed = whole.started.seed
    again.resume.model_fingerprint = whole.started.model_fingerprint
    again.resume.prompt_tokens = whole.started.prompt_tokens
    return again


GREEDY: list[tuple[dict[str, Any], dict[str, Any]]] = [  # ours, and what transformers calls it
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"banned_token_ids": range(3, 300)}, {"suppress_tokens": list(range(3, 300))}),
    (
        {"logit_bias": {77: 1.5, 78: 1.25, 300: 1.0}},
        {"logits_processor": [SequenceBiasLogitsProcessor({(77,): 1.5, (78,): 1.25, (300,): 1.0})]},
    ),
    ({"allowed_token_ids": range(100, 140)}, {"suppress_tokens": [i for i in range(512) if not 100 <= i < 140]}),
]


async def test_greedy_answers_are_those_of_transformers(cluster: Cluster, model: LlamaForCausalLM) -> None:
    for ours, theirs in GREEDY:
        request = asked({"temperature": 0, **ours}, stopping=pb.Stopping(max_tokens=24, min_tokens=24))
        answer = await cluster.generate(request)
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([PROMPT]), do_sample=False, max_new_tokens=24, min_new_tokens=24, pad_token_id=0, **theirs
            )
        assert answer.token_ids == expected[0, len(PROMPT) :].tolist(), ours


SEEDED: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5, "top_k": 3},
    {"presence_penalty": 1.5, "top_k": 3},
    {
        "repetition_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {9: 2.0},
        "banned_token_ids": [5],
        "min_p": 0.1,
    },
]


async def test_seeded_answers_are_those_of_one_engine_from_any_cut(
    cluster: Cluster, engine: Engine, toy_folder: Path
) -> None:
    for sampling in SEEDED:
        stopping = pb.Stopping(max_tokens=24, ignore_eos=True)
        request = asked({"seed": 3, **sampling}, stopping=stopping, top_logprobs=4)
        request.logprobs_stage = pb.LOGPROBS_STAGE_DRAWN
        whole = await cluster.generate(request)
        tokens = reference(engine, as_work(request, engine, toy_folder))
        assert whole.token_ids == [token.token_id for token in tokens]
        assert whole.logprobs == [tuple((each.token_id, each.logprob) for each in t.top_logprobs) for t in tokens]
        for received in (1, 9, 23):
            rest = await stream(cluster, resumed(request, whole, received))
            assert ids_of(rest) == whole.token_ids[received:]


async def stream(cluster: Cluster, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Every message of an answer."""
    messages = Messages()
    await cluster.follow(request, messages)
    return messages.all


class Messages(Answer):
    """Keeps the messages as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[pb.GenerateResponse] = []

    def add(self, response: pb.GenerateResponse) -> None:
        self.all.append(response)


def ids_of(messages: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token_id for message in messages for token_id in message.delta.token_ids]


async def test_scores_are_those_of_transformers(cluster: Cluster, model: LlamaForCausalLM) -> None:
    request = token_request(PROMPT, 8)
    await cluster.generate(request)  # now the prompt is cached
    request.logprobs, request.prompt_logprobs = True, 3
    messages = await stream(cluster, request)
    with torch.inference_mode():
        sequence = torch.tensor([PROMPT + ids_of(messages)])
        expected = torch.log_softmax(model(sequence).logits[0].double(), -1)
    assert [message.WhichOneof("event") for message in messages[:2]] == ["started", "prompt_logprobs"]
    told = [score for message in messages for score in message.prompt_logprobs.tokens]
    assert [len(score.candidates) for score in told] == [3] * (len(PROMPT) - 1)
    told += [score for message in messages for score in message.delta.top_logprobs]
    for score, row, token_id in zip(told, expected, sequence[0, 1:].tolist(), strict=False):
        assert score.chosen.token_id == token_id
        assert score.chosen.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        assert [each.logprob for each in score.candidates] == pytest.approx(
            row.topk(len(score.candidates)).values.tolist(), abs=1e-3
        )
    usage = messages[-1].finished.usage
    assert usage.resumes or (usage.cached_tokens, usage.prefill_tokens_computed) == (0, len(PROMPT))


async def test_json_schemas_are_followed_also_from_where_a_client_was_cut_off(cluster: Cluster) -> None:
    requests = []
    for seed in range(16):
        grammar = pb.Grammar(json_schema=json.dumps(random_schema(seed)))
        stopping = pb.Stopping(max_tokens=300)
        requests.append(asked({"seed": seed, "logit_bias": dict(BIAS)}, grammar=grammar, stopping=stopping))
    wholes = await cluster.generate_all(requests, concurrency=8)
    again, cuts = [], []
    for seed, (request, whole) in enumerate(zip(requests, wholes, strict=True)):
        jsonschema.validate(json.loads(whole.text), random_schema(seed))
        assert whole.finished is not None
        assert whole.finished.finish_reason == pb.FINISH_REASON_STOP
        for cut in (random.Random(seed).randrange(len(whole.token_ids)), len(whole.token_ids)):
            again.append(resumed(request, whole, cut))
            cuts.append((whole, cut))
    for request, (whole, cut) in zip(again, cuts, strict=True):
        rest = await stream(cluster, request)
        assert ids_of(rest) == whole.token_ids[cut:]
        assert "".join(message.delta.text for message in rest) == whole.text  # the client says that it has none
        assert whole.finished is not None
        assert rest[-1].finished.stop_match == whole.finished.stop_match


async def test_a_regular_expression_and_a_grammar(cluster: Cluster) -> None:
    answer = await cluster.generate(asked({}, grammar=pb.Grammar(regex=r"(\+|-)[0-9]{3} (mm|cm)")))
    assert answer.text[0] in "+-"
    assert answer.text[1:4].isdigit()
    assert answer.text[4:] in (" mm", " cm")
    assert answer.finished is not None
    assert answer.finished.stop_match.grammar
    lark = 'start: "(" start ")" | "x"'
    answer = await cluster.generate(asked({"logit_bias": dict(BIAS)}, grammar=pb.Grammar(lark=lark)))
    depth = answer.text.index("x")
    assert answer.text == "(" * depth + "x" + ")" * depth


async def test_what_leaves_no_token_is_an_error_of_the_request(cluster: Cluster) -> None:
    bad = pb.Grammar(json_schema='{"type": "array", "uniqueItems": true}')
    cases = {
        "grammar.json_schema": asked({}, grammar=bad),
        "sampling.logit_bias[512]": asked({"logit_bias": {512: 1}}),
        "prompt_logprobs": asked({}, prompt_logprobs=21),
    }
    for field, request in cases.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        violation = error_details_pb2.BadRequest()
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        assert any(detail.Unpack(violation) for detail in status.details)
        assert violation.field_violations[0].field == field
    mark = TOKENIZER.encode("!").ids
    with pytest.raises(grpc.aio.AioRpcError, match="token 0 of the completion") as caught:
        await cluster.generate(asked({"banned_token_ids": mark}, grammar=pb.Grammar(regex="!+")))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_killed_worker_leaves_every_answer_as_it_would_have_been(cluster: Cluster) -> None:
    strings = {"type": "string", "minLength": 1, "maxLength": 8}
    schema = {"type": "array", "items": {"anyOf": [strings, {"enum": [None, "é"]}]}, "minItems": 40, "maxItems": 60}
    grammar, stopping = pb.Grammar(json_schema=json.dumps(schema)), pb.Stopping(max_tokens=440)
    bias = dict(BIAS) | {TOKENIZER.encode("\\").ids[0]: 7.0}  # so that most cuts are inside an escape
    requests = [asked({"seed": seed, "logit_bias": bias}, grammar=grammar, stopping=stopping) for seed in range(8)]
    expected = await cluster.generate_all(requests, concurrency=8)
    victim = next(worker.pid for worker in cluster.status().workers if worker.id == "decode-0")
    answers = [Answer() for _ in requests]
    tasks = [asyncio.create_task(cluster.follow(*each)) for each in zip(requests, answers, strict=True)]
    async with asyncio.timeout(60):
        while not all(len(answer.token_ids) > 5 for answer in answers):
            await asyncio.sleep(0.005)
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*tasks)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), schema)
    assert any(answer.finished and answer.finished.usage.resumes for answer in answers)
