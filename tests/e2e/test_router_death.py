"""A killed router takes its streams along, and nothing else: its clients hold all that it takes to go on."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from contextlib import aclosing

from cluster import resumable
from cluster.flags import GenerateFlags
from cluster.generate import make_request
from pdserve.v1 import generation_pb2 as pb
from tests.e2e.harness import ROOT, Answer, Cluster, serving_router

PROMPT = "Once upon a time there was a router"
NUM_TOKENS = 440


def router_pid(cluster: Cluster) -> int:
    """The one that serves, not its spare."""
    return serving_router(cluster.session, cluster.address).pid


def text_request(seed: int | None, stop: str = "") -> pb.GenerateRequest:
    """A long answer; the toy model says bytes at random, so that many characters are broken."""
    request = pb.GenerateRequest(text=f"{PROMPT} {seed}")
    request.stopping.max_tokens = NUM_TOKENS
    request.stopping.ignore_eos = True
    request.sampling.temperature = 0.0 if seed is None else 1.0
    request.stopping.stop.extend([stop] if stop else [])
    if seed is not None:
        request.sampling.seed = seed
    return request


def late_text(answer: Answer) -> str:
    """A stop string for most of the answer: text of several tokens that does not come earlier."""
    start = len(answer.text) * 9 // 10
    length = next(n for n in range(3, 30) if answer.text.find(answer.text[start : start + n]) == start)
    return answer.text[start : start + length]


async def follow(cluster: Cluster, request: pb.GenerateRequest, answer: Answer) -> None:
    limits = resumable.Limits(timeout_s=60, resume_for_s=30)
    async with aclosing(resumable.generate(cluster.address, request, limits)) as responses:
        async for response in responses:
            answer.add(response)


async def test_streams_go_on_as_if_nothing_had_been(cluster: Cluster) -> None:
    requests = [text_request(seed) for seed in (None, *range(7))]
    undisturbed = await cluster.generate_all(requests, concurrency=8)
    assert any("\ufffd" in answer.text for answer in undisturbed)
    with_stop = [text_request(seed, late_text(answer)) for seed, answer in zip((None, 0, 1), undisturbed, strict=False)]
    undisturbed += await cluster.generate_all(with_stop, concurrency=3)
    requests += with_stop
    answers = [Answer() for _ in requests]
    tasks = [asyncio.create_task(follow(cluster, *each)) for each in zip(requests, answers, strict=True)]
    async with asyncio.timeout(30):
        while not all(len(answer.token_ids) > 20 for answer in answers):
            await asyncio.sleep(0.005)
    victim, began = router_pid(cluster), time.monotonic()
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*tasks)
    for got, expected in zip(answers, undisturbed, strict=True):
        assert got.finished is not None
        assert expected.finished is not None
        assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
        assert got.finished.stop_match == expected.finished.stop_match
        assert got.finished.usage.completion_tokens == len(expected.token_ids)
    assert sum(answer.finished.usage.resumes > 0 for answer in answers if answer.finished) > len(answers) / 2
    assert router_pid(cluster) != victim
    gaps = [max(b - a for a, b in zip(got.times, got.times[1:], strict=False)) for got in answers]
    print(f"longest pause {max(gaps):.2f} s; all done {time.monotonic() - began:.2f} s after the kill")


async def test_the_command_line_prints_every_character_once(cluster: Cluster) -> None:
    flags = GenerateFlags(PROMPT, temperature=1.0, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    undisturbed = await cluster.generate(make_request(flags, PROMPT))
    command = [sys.executable, "-m", "cluster.cli", "generate", PROMPT, "--address", cluster.address, "--ignore-eos"]
    command += ["--temperature", "1", "--seed", "5", "--max-tokens", str(NUM_TOKENS)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    begin = await process.stdout.readexactly(1)
    os.kill(router_pid(cluster), signal.SIGKILL)
    async with asyncio.timeout(60):
        rest, notes = await process.communicate()
    assert (begin + rest).decode() == undisturbed.text + "\n"
    assert process.returncode == 0
    assert notes.decode().count("pdserve: the stream broke") == 1
