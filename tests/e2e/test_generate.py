"""Clients against a whole cluster: exact at any load, clear errors, nothing left behind."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cluster import resumable
from engine.batch import Chunk
from engine.load import EngineConfig, load_engine
from engine.sampler import Step, sample
from pdserve.request import Sampling, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from tests.e2e.harness import ROOT, Answer, Cluster, token_request


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 13 * i + length) % 500 + 3 for i in range(length)]


def reference(toy_folder: Path, requests: Sequence[pb.GenerateRequest]) -> list[list[int]]:
    """The same completions by one engine in this process, one request at a time."""
    engine = load_engine(EngineConfig(str(toy_folder), "toy", "float32", num_pages=64))
    completions = []
    for request in requests:
        ids = tuple(request.token_ids.ids)
        sampling = Sampling(temperature=request.sampling.temperature, seed=request.sampling.seed)
        work = WorkRequest("", ids, len(ids), sampling, request.stopping.max_tokens)
        tokens = sample(engine.runner.run([Chunk(ids, 0, range(64), sample=True)]), [Step(work, 0)])
        while not tokens[-1].finish:
            chunk = Chunk([tokens[-1].token_id], len(ids) + tokens[-1].number, range(64), sample=True)
            tokens += sample(engine.runner.run([chunk]), [Step(work, len(tokens))])
        completions.append([token.token_id for token in tokens])
    return completions


async def test_answers_equal_one_engine_at_any_load(cluster: Cluster, toy_folder: Path) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 100, 31, 32, 33, 48]
    requests = [token_request(prompt(n), 24, seed=n if n % 2 else None, top_logprobs=20) for n in lengths]
    alone = await cluster.generate_all(requests, concurrency=1)
    together = await cluster.generate_all(requests, concurrency=16)
    assert [answer.token_ids for answer in alone] == reference(toy_folder, requests)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]
    for length, answer in zip(lengths, together, strict=True):
        assert answer.finished is not None
        usage = answer.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (length, 24)
        if not usage.resumes:  # a busy machine may have taken a worker for lost
            assert usage.cached_tokens + usage.prefill_tokens_computed == length
            assert usage.decode_steps == 23


async def test_200_seeds_give_the_same_tokens_at_concurrency_1_and_16(cluster: Cluster, toy_folder: Path) -> None:
    requests = [token_request(prompt(20), 32, seed=seed) for seed in range(200)]
    together = await cluster.generate_all(requests, concurrency=16)
    assert {answer.finished.workers.decode for answer in together if answer.finished} == {"decode-0", "decode-1"}
    tokens = [answer.token_ids for answer in together]
    assert tokens == reference(toy_folder, requests)  # one at a time, by one engine
    alone = await cluster.generate_all(requests[::10], concurrency=1)
    assert [answer.token_ids for answer in alone] == tokens[::10]
    assert len(set(map(tuple, tokens))) >= 190


async def test_text_chat_and_stop_strings(cluster: Cluster) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello there")])
    request = pb.GenerateRequest(chat=chat)
    request.stopping.max_tokens = 40
    request.stopping.ignore_eos = True
    request.sampling.seed = 3
    whole = await cluster.generate(request)
    assert whole.started is not None
    assert whole.started.exact
    assert whole.finished is not None
    assert whole.finished.stop_match.max_tokens == 40
    stop = next(piece for piece in (whole.text[8:11], whole.text[4:7]) if "\ufffd" not in piece)
    request.stopping.stop.append(stop)
    cut = await cluster.generate(request)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finished is not None
    assert cut.finished.stop_match.stop_string == stop


@pytest.mark.parametrize("seed", [None, 7])
async def test_a_client_goes_on_from_any_token(cluster: Cluster, seed: int | None) -> None:
    request = token_request(prompt(40), 24, seed=seed)
    whole = await cluster.generate(request)
    assert whole.started is not None
    for received in (0, 1, 8, 22, 23, 24):
        request.resume.CopyFrom(
            pb.Resume(
                token_ids=whole.token_ids[:received],
                seed=whole.started.seed,
                model_fingerprint=whole.started.model_fingerprint,
                prompt_tokens=whole.started.prompt_tokens,
            )
        )
        rest = Answer(token_ids=whole.token_ids[:received])
        async for response in resumable.generate(cluster.address, request, resumable.Limits()):
            rest.add(response)
        assert (rest.token_ids, rest.text) == (whole.token_ids, whole.text)
        assert rest.finished is not None
        usage = rest.finished.usage
        assert (usage.completion_tokens, usage.prompt_tokens) == (24, 40)
        assert usage.decode_steps == max(0, 23 - received)


INVALID = {
    "prompt": pb.GenerateRequest(),
    "token_ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 512])),
    "sampling.temperature": pb.GenerateRequest(text="a", sampling=pb.Sampling(temperature=float("nan"))),
    "sampling.top_p": pb.GenerateRequest(text="a", sampling=pb.Sampling(top_p=0.0)),
    "stopping.max_tokens": pb.GenerateRequest(text="a", stopping=pb.Stopping(max_tokens=0)),
    "top_logprobs": pb.GenerateRequest(text="a", top_logprobs=21),
    "stopping.stop": pb.GenerateRequest(text="a", stopping=pb.Stopping(stop=["x"] * 17)),
}


@pytest.mark.parametrize("field", INVALID)
async def test_bad_requests_name_the_field(cluster: Cluster, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(INVALID[field])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    violation = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violation) for detail in status.details)
    assert violation.field_violations[0].field.startswith(field)


async def test_an_overlong_prompt_is_refused_with_both_numbers_or_truncated(cluster: Cluster) -> None:
    request = token_request(prompt(600), 4)
    with pytest.raises(grpc.aio.AioRpcError, match=r"600.*512|512.*600"):
        await cluster.generate(request)
    request.truncate_prompt_tokens = 100
    answer = await cluster.generate(request)
    same = await cluster.generate(token_request(prompt(600)[-100:], 4))
    assert answer.token_ids == same.token_ids
    assert answer.started is not None
    assert answer.started.prompt_tokens == 100


async def test_generation_ends_at_the_window(cluster: Cluster) -> None:
    answer = await cluster.generate(token_request(prompt(500), 100))
    assert len(answer.token_ids) == 12
    assert answer.finished is not None
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert answer.finished.stop_match.context_window == 512


async def test_an_unknown_model_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(pb.GenerateRequest(model="other", text="a"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_deadline_frees_everything(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(token_request(prompt(20), 490), timeout_s=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_100_cancelled_requests_leave_nothing(cluster: Cluster) -> None:
    async def cancelled_after(delay_s: float, number: int) -> None:
        task = asyncio.create_task(cluster.generate(token_request(prompt(100 + number), 150, seed=number)))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for wave in range(5):
        await asyncio.gather(*(cancelled_after(0.02 * number, 20 * wave + number) for number in range(20)))
    cluster.assert_clean()


def test_generate_and_status_commands_print_json(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "cluster.cli"]
    generate = [
        *command,
        "generate",
        "hello",
        "--address",
        cluster.address,
        "--max-tokens",
        "5",
        "--ignore-eos",
        "--json",
    ]
    answer = json.loads(subprocess.check_output(generate, cwd=ROOT, timeout=60))
    assert len(answer["token_ids"]) == 5
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["timings"]["ttft_ms"] > 0
    status = json.loads(
        subprocess.check_output([*command, "status", "--address", cluster.address, "--json"], cwd=ROOT, timeout=60)
    )
    assert {worker["role"] for worker in status["workers"]} == {"prefill", "decode"}
    assert {"id", "role", "pid", "incarnation", "address", "load", "pages"} <= status["workers"][0].keys()
