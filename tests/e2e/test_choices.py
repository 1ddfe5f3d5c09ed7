"""Several choices of one request on a real cluster: pages shared, and each as alone, whatever is killed meanwhile."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from cluster import resumable
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.v1 import generation_pb2 as pb
from tests.e2e.harness import Answer, Cluster, token_request
from tests.e2e.test_router_death import router_pid

PAGE = 16
LENGTH = 300
SHARED_PAGES = 18  # of the prompt's whole ones; twelve tokens are left


def asked(salt: int, n: int = 1, seed: int = 21) -> pb.GenerateRequest:
    request = token_request([(7 * i * i + salt * i) % 500 + 3 for i in range(LENGTH)], 200, seed=seed)
    request.n = n
    return request


class Choices:
    """The answers to one request, by choice."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}

    async def follow(self, responses: AsyncIterator[pb.GenerateResponse]) -> None:
        async for response in responses:
            event = response.WhichOneof("event")
            assert event is not None
            self.answers.setdefault(getattr(response, event).index, Answer()).add(response)

    async def until_all_have(self, num_tokens: int) -> None:
        async with asyncio.timeout(60):
            while not (self.answers and all(len(each.token_ids) >= num_tokens for each in self.answers.values())):
                await asyncio.sleep(0.005)  # tokens come over the wire, not as an event here

    def token_ids(self) -> list[list[int]]:
        return [self.answers[index].token_ids for index in range(len(self.answers))]

    def usages(self) -> list[pb.Usage]:
        finished = [self.answers[index].finished for index in range(len(self.answers))]
        return [each.usage for each in finished if each is not None]


async def follow(cluster: Cluster, request: pb.GenerateRequest, choices: Choices) -> None:
    limits = resumable.Limits(timeout_s=100, resume_for_s=30)
    async with aclosing(resumable.generate(cluster.address, request, limits)) as responses:
        await choices.follow(responses)


async def ledger(cluster: Cluster) -> list[cluster_pb2.WorkerLedger]:
    """Of the decode workers that hold anything."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        workers = (await stub.GetLedger(cluster_pb2.GetLedgerRequest(), timeout=5)).workers
    return [worker for worker in workers if worker.role == "decode" and worker.entries]


async def alone(cluster: Cluster, salt: int, choices: Choices) -> list[list[int]]:
    """Each choice asked for by itself, with the seed that was told."""
    started = [choices.answers[index].started for index in range(len(choices.answers))]
    requests = [asked(salt, seed=each.seed) for each in started if each is not None]
    return [answer.token_ids for answer in await cluster.generate_all(requests, concurrency=4)]


async def test_eight_choices_hold_the_prompts_pages_together(cluster: Cluster) -> None:
    choices = Choices()
    task = asyncio.create_task(follow(cluster, asked(29, n=8), choices))
    await choices.until_all_have(2)
    (worker,) = await ledger(cluster)
    await task
    assert [entry.state for entry in worker.entries] == ["running"] * 8
    assert sum(entry.pages for entry in worker.entries) - worker.pages.in_use == 7 * SHARED_PAGES
    own = LENGTH - SHARED_PAGES * PAGE
    assert [usage.prefill_tokens_computed for usage in choices.usages()] == [LENGTH, *[own] * 7]
    assert choices.token_ids() == await alone(cluster, 29, choices)


async def test_a_killed_router_and_a_killed_decode_worker_cost_no_choice_a_token(cluster: Cluster) -> None:
    choices = Choices()
    task = asyncio.create_task(follow(cluster, asked(31, n=4), choices))
    await choices.until_all_have(5)
    os.kill(router_pid(cluster), signal.SIGKILL)
    await choices.until_all_have(30)
    (worker, *_) = await ledger(cluster)
    os.kill(next(each.pid for each in cluster.status().workers if each.id == worker.id), signal.SIGKILL)
    await task
    assert choices.token_ids() == await alone(cluster, 31, choices)
    assert sum(usage.resumes for usage in choices.usages()) > 4
