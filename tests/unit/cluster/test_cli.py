"""The command line against a router of canned answers: what it sends, what it prints, how it fails."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.answers import bars
from pdserve import rpc
from pdserve.errors import InvalidRequest, ModelNotFound, QueueFull
from pdserve.v1 import cluster_pb2 as cpb
from pdserve.v1 import cluster_pb2_grpc, generation_pb2_grpc
from pdserve.v1 import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
STATUS = cpb.GetStatusResponse(
    workers=[cpb.WorkerStatus(id="decode-0", role="decode", pid=7, incarnation="i", address="h:1", exact=True,
                              draining=True, pages=cpb.Pages(total=9, free=8, in_use=1))],
    queued_requests=2, silent=["decode-1"],
)  # fmt: skip


class Router(generation_pb2_grpc.GenerationServiceServicer, cluster_pb2_grpc.ClusterServiceServicer):
    """Answers by the name of the model asked for; keeps the last request."""

    request = pb.GenerateRequest()

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.request = request
        if request.model == "none":
            await rpc.abort(context, ModelNotFound("no model none here; served: toy"))
        if request.model == "full":
            await rpc.abort(context, QueueFull("256 requests wait already", 1.5))
        if request.sampling.temperature > 100:
            await rpc.abort(context, InvalidRequest("sampling.temperature", "must be in [0, 100]"))
        indices = range(max(1, request.n))
        for index in indices:
            yield pb.GenerateResponse(started=pb.Started(seed=2**63 + index, model="toy", index=index))
        for number, text in enumerate(["Pa", "", "ris"]):
            chosen = pb.TokenLogprob(token_id=number, logprob=-0.5, text=text)
            wanted = request.top_logprobs or request.logprobs
            steps = [pb.TopLogprobs(candidates=[chosen] * request.top_logprobs, chosen=chosen)] if wanted else []
            for index in reversed(indices):
                yield pb.GenerateResponse(
                    delta=pb.Delta(index=index, text=text, token_ids=[number], token_number=number, top_logprobs=steps)
                )
        for index in reversed(indices):
            yield pb.GenerateResponse(finished=self.finished(index))

    def finished(self, index: int) -> pb.Finished:
        return pb.Finished(
            index=index,
            finish_reason=pb.FINISH_REASON_LENGTH if self.request.stopping.max_tokens == 3 else pb.FINISH_REASON_STOP,
            stop_match=pb.StopMatch(eos_token_id=2),
            usage=pb.Usage(prompt_tokens=5, completion_tokens=3, decode_steps=2),
            timings=pb.Timings(ttft_ms=12.5),
            workers=pb.Workers(prefill="prefill-0", prefill_pid=1, decode="decode-0", decode_pid=2, transfer_bytes=3),
        )

    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]
        return STATUS


class Commands:
    """Runs the real command in a process of its own."""

    def __init__(self, router: Router, address: str) -> None:
        self.router = router
        self.address = address

    async def __call__(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cluster.cli", *arguments, cwd=ROOT,
            env={**os.environ, "PDSERVE_ADDRESS": self.address},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate(stdin.encode())
        return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
async def run() -> AsyncIterator[Commands]:
    router, server = Router(), rpc.server()  # type: ignore[abstract]
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(router, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(router, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    yield Commands(router, f"127.0.0.1:{port}")
    await server.stop(grace=None)


async def test_generate_streams_text(run: Commands) -> None:
    assert await run("generate", "What?", "--chat", "--seed", "7", "--stop", "a", "--stop", "b") == (0, "Paris\n", "")
    request = run.router.request
    assert [(each.role, each.content) for each in request.chat.messages] == [("user", "What?")]
    assert (request.sampling.temperature, request.sampling.seed, request.stopping.max_tokens) == (0.0, 7, 256)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert list(request.stopping.stop) == ["a", "b"]


async def test_generate_reads_standard_input(run: Commands) -> None:
    code, _, _ = await run("generate", "-", "--temperature", "0.5", stdin="from a pipe")
    assert (code, run.router.request.text, run.router.request.sampling.temperature) == (0, "from a pipe", 0.5)


async def test_generate_json_is_one_object(run: Commands) -> None:
    code, out, _ = await run("generate", "x", "--json")
    answer = json.loads(out)
    assert code == 0
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("Paris", [0, 1, 2], "stop")
    assert answer["usage"] == {
        "prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 3, "prefill_tokens_computed": 0, "decode_steps": 2,
        "resumes": 0,
    }  # fmt: skip
    assert answer["timings"]["ttft_ms"] == 12.5
    assert (answer["workers"]["prefill_pid"], answer["workers"]["transfer_bytes"]) == (1, 3)
    assert (answer["stop_match"], answer["started"]["seed"]) == ({"eos_token_id": 2}, 2**63)


async def test_generate_draws_candidates(run: Commands) -> None:
    code, out, _ = await run("generate", "x", "--top-logprobs", "2")
    assert code == 0
    assert out.count("60.7%") == 6
    assert run.router.request.top_logprobs == 2


async def test_generate_shows_how_likely_tokens_were(run: Commands) -> None:
    code, out, _ = await run("generate", "x", "--logprobs")
    assert (code, out.count("60.7%")) == (0, 3)
    code, out, _ = await run("generate", "x", "--logprobs", "--json")
    assert (json.loads(out)["logprobs"], "top_logprobs" in json.loads(out)) == ([-0.5] * 3, False)


async def test_several_choices_are_shown_one_after_the_other_whatever_comes_first(run: Commands) -> None:
    code, out, _ = await run("generate", "x", "--n", "3", "--temperature", "1")
    assert code == 0
    assert out == "".join(f"[{index}] seed {2**63 + index}\nParis\n" for index in range(3))
    code, out, _ = await run("generate", "x", "--n", "2", "--json")
    choices = json.loads(out)["choices"]
    assert [(each["text"], each["started"]["index"]) for each in choices] == [("Paris", 0), ("Paris", 1)]


async def test_every_control_has_a_flag(run: Commands, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    flags = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "0.25"]
    flags += ["--min-tokens", "3", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.125", "--ignore-eos"]
    assert (await run("generate", "x", *flags, "--json-schema", str(tmp_path / "schema.json")))[0] == 0
    asked = run.router.request
    sampling = asked.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, 0.25)
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (5, 0.5, 0.125)
    assert (asked.stopping.min_tokens, asked.stopping.ignore_eos) == (3, True)
    assert asked.grammar.json_schema == '{"type": "null"}'
    assert not asked.HasField("n")
    assert (await run("generate", "x", "--grammar", "-", stdin='start: "a"'))[0] == 0
    assert run.router.request.grammar.lark == 'start: "a"'
    assert await run("generate", "x", "--regex", "a+") == (0, "Paris\n", "")
    assert run.router.request.grammar.regex == "a+"


async def test_what_is_cut_before_its_grammar_ends_is_said_to_be(run: Commands) -> None:
    code, out, err = await run("generate", "x", "--regex", "a+", "--max-tokens", "3")
    assert (code, out, err) == (
        0,
        "Paris\n",
        "pdserve: the answer was cut before it was whole; allow more --max-tokens\n",
    )
    assert (await run("generate", "x", "--max-tokens", "3"))[2] == ""


def test_a_bar_is_as_long_as_the_candidate_is_likely() -> None:
    lines = list(bars("a", [{"text": "a", "logprob": 0.0}, {"text": "bc", "logprob": -30.0}]))
    assert [line.count("█") for line in lines] == [0, 40, 0]
    assert lines[1].startswith("  'a'  █")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "none"), 1, "pdserve: no model none here; served: toy\n"),
        (("--model", "full"), 1, "pdserve: 256 requests wait already\n"),
        (("--temperature", "101"), 2, "pdserve: sampling.temperature: must be in [0, 100]\n"),
        (("--seed", "-1"), 2, "pdserve: seed: "),
        (("--regex", "a", "--grammar", "-"), 2, "pdserve: json_schema, regex, grammar: only one"),
        (("--json-schema", "-", "--grammar", "-"), 2, "pdserve: prompt, json_schema, grammar: only one"),
        (("--json-schema", "/nowhere"), 2, "pdserve: json_schema: takes the name of a file"),
        (("--stop", os.fsdecode(b"\xff")), 2, "pdserve: stop: is not UTF-8 text\n"),
        (("--model", os.fsdecode(b"\xff")), 2, "pdserve: model: is not UTF-8 text\n"),
        (("--timeout", "inf"), 2, "pdserve: timeout: inf is not allowed"),
        (("--address", ""), 2, "pdserve: address: is empty"),
    ],
)
async def test_a_refusal_is_one_line(run: Commands, arguments: tuple[str, ...], code: int, message: str) -> None:
    got, out, err = await run("generate", "x", *arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(message)


async def test_nobody_there_is_one_line_with_a_hint(run: Commands) -> None:
    code, _, err = await run("status", "--address", "127.0.0.1:1")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("pdserve: 127.0.0.1:1: ")
    assert "is `pdserve up` running there?" in err


async def test_status_as_table_and_as_json(run: Commands) -> None:
    code, out, _ = await run("status")
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["ID", "ROLE", "PID"]
    assert out.splitlines()[1].split() == [
        "decode-0",
        "decode",
        "7",
        "h:1",
        *"00",
        "9",
        "8",
        "0",
        "1",
        "0",
        *"---",
        "yes",
        "draining",
    ]
    assert out.splitlines()[2] == "decode-1 is silent: it stands still, was lost, or is starting"
    code, out, _ = await run("status", "--json")
    assert json.loads(out)["silent"] == ["decode-1"]
    worker = json.loads(out)["workers"][0]
    assert (worker["id"], worker["role"], worker["pid"], worker["incarnation"]) == ("decode-0", "decode", 7, "i")
    assert (worker["load"]["requests"], worker["pages"]["free"]) == (0, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("up", "--dtype", "float16"),
            "pdserve: configuration: dtype: 'float16' is not one of auto, bfloat16, float32\n",
        ),
        (("up", "--prefill", "0"), "pdserve: configuration: prefill: 0 is not in [1, 1024]\n"),
        (("up", "--config", "/none.yaml"), "pdserve: /none.yaml: cannot be read: "),
        (("up", "--model", "/none.gguf"), "pdserve: "),
    ],
)
async def test_up_refuses_in_one_line_before_it_starts(run: Commands, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = await run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


async def test_a_flag_that_is_none_exits_with_2(run: Commands) -> None:
    code, _, err = await run("up", "--prefil", "2")
    assert code == 2
    assert "--prefil" in err


async def test_version_and_help(run: Commands) -> None:
    assert await run("--version") == (0, "0.1.0\n", "")
    assert (await run("up", "--help"))[0] == 0


def test_the_command_line_loads_nothing_heavy() -> None:
    """What makes --help quick."""
    program = "import sys, cluster.cli; print({'grpc', 'ray', 'torch', 'redis', 'yaml'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
