"""Several choices through the whole relay in one process: one prefill, its pages shared, each as a run of its own."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine.load import Engine
from pdserve import rpc
from pdserve.request import WorkRequest
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc
from router.service import GenerationServicer
from router.tokenizer import TextModel
from router.validation import ServedModel, plan
from tests.inprocess import InProcess, in_process, reference
from tests.toy import toy_engine, write_toy_model
from tests.toy_tokenizer import write_toy_tokenizer

PAGE = 16
PROMPT = [(7 * i * i + 13 * i) % 500 + 3 for i in range(1000)]
SHARED_PAGES = 62  # of the prompt's whole ones; eight tokens are left
FULL = pb.Stopping(max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_toy_model(tmp_path_factory.mktemp("toy"), max_position_embeddings=2048)
    write_toy_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> list[Engine]:
    """Of a prefill worker, of two decode workers, for references."""
    return [toy_engine(folder, num_pages=256) for _ in range(4)]


@dataclass
class Models:
    """One model."""

    model: ServedModel

    def find(self, name: str) -> ServedModel:
        return self.model

    def all(self) -> Sequence[ServedModel]:
        return [self.model]


@dataclass
class Told:
    """What a client has of one choice."""

    started: pb.Started
    token_ids: list[int] = field(default_factory=list)
    finished: pb.Finished = field(default_factory=pb.Finished)


class Client:
    """A router in front of the cluster, and its client."""

    def __init__(self, cluster: InProcess, model: ServedModel) -> None:
        self.model = model
        self._servicer = GenerationServicer(Models(model), cluster.pipeline)
        self.choices: dict[int, Told] = {}

    @asynccontextmanager
    async def asking(self, request: pb.GenerateRequest) -> AsyncIterator[AsyncIterator[pb.GenerateResponse]]:
        server = rpc.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._servicer, server)
        port = rpc.listen(server, "127.0.0.1", 0)
        await server.start()
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield self._followed(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60))
        await server.stop(None)

    async def _followed(self, call: AsyncIterable[pb.GenerateResponse]) -> AsyncIterator[pb.GenerateResponse]:
        async for response in call:
            match response.WhichOneof("event"):
                case "started":
                    self.choices[response.started.index] = Told(response.started)
                case "delta":
                    choice = self.choices[response.delta.index]
                    assert response.delta.token_number == len(choice.token_ids)
                    choice.token_ids += response.delta.token_ids
                case "finished":
                    self.choices[response.finished.index].finished = response.finished
            yield response

    async def until_all_have(self, answer: AsyncIterator[pb.GenerateResponse], num_tokens: int) -> None:
        async for _ in answer:
            if self.choices and all(len(each.token_ids) >= num_tokens for each in self.choices.values()):
                return

    def works(self, request: pb.GenerateRequest) -> list[WorkRequest]:
        """The request of each choice on its own, with the seed that was told."""
        work = plan(request, self.model, "alone").work
        seeds = [self.choices[index].started.seed for index in range(max(1, request.n))]
        return [replace(work, sampling=replace(work.sampling, seed=seed), prompt_logprobs=None) for seed in seeds]


@asynccontextmanager
async def client_of(cluster: InProcess, folder: Path) -> AsyncIterator[Client]:
    card = cluster.decodes[0].info.card
    yield Client(cluster, ServedModel(card, TextModel.load(folder), max_request_tokens=2048))
    await cluster.assert_clean()


def asked(
    n: int, stopping: pb.Stopping = FULL, seed: int | None = 11, temperature: float | None = None
) -> pb.GenerateRequest:
    sampling = pb.Sampling(seed=seed, temperature=temperature)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), n=n, stopping=stopping, sampling=sampling)


async def rest(answer: AsyncIterator[pb.GenerateResponse]) -> None:
    async for _ in answer:
        pass


def alone(engine: Engine, works: Sequence[WorkRequest]) -> list[list[int]]:
    return [[token.token_id for token in reference(engine, work)] for work in works]


async def test_eight_choices_share_one_prefill_and_its_pages(engines: list[Engine], folder: Path) -> None:
    request = asked(8, seed=None)
    async with (
        in_process(engines[:1], engines[1:3]) as cluster,
        client_of(cluster, folder) as client,
        client.asking(request) as answer,
    ):
        await client.until_all_have(answer, 3)
        audits = [await end.thread.audit() for end in cluster.decodes]
        await rest(answer)
    holders = [entry.num_pages for entry in audits[0].ledger.entries]
    assert len(holders) == 8, "all beside the first, though the other decode worker is idle"
    assert sum(holders) - audits[0].pages.in_use == 7 * SHARED_PAGES
    assert audits[1].ledger.entries == ()
    usages = [client.choices[index].finished.usage for index in range(8)]
    assert [each.prefill_tokens_computed for each in usages] == [1000, *[1000 - SHARED_PAGES * PAGE] * 7]
    assert [each.cached_tokens for each in usages] == [0, *[SHARED_PAGES * PAGE] * 7]
    pushed = [client.choices[index].finished.workers.transfer_bytes for index in range(8)]
    assert [each // engines[0].card.kv_layout.page_bytes for each in pushed] == [SHARED_PAGES + 1, *[1] * 7]
    told = [client.choices[index].token_ids for index in range(8)]
    assert told == alone(engines[3], client.works(request))
    assert len({tuple(token_ids) for token_ids in told}) == 8
    assert all(each.prompt_tokens == 1000 and each.decode_steps == 119 for each in usages)


async def test_a_lost_decode_worker_costs_no_choice_a_token(folder: Path) -> None:
    fresh = [toy_engine(folder, num_pages=512) for _ in range(4)]
    request = asked(4)
    async with in_process(fresh[:1], fresh[1:3]) as cluster, client_of(cluster, folder) as client:
        async with client.asking(request) as answer:
            await client.until_all_have(answer, 5)
            await cluster.decodes[0].server.stop(0)
            await rest(answer)
        async with asyncio.timeout(5):
            while not cluster.is_clean():  # also the lost one: its stream has broken
                await asyncio.sleep(0.01)
    assert [client.choices[index].token_ids for index in range(4)] == alone(fresh[3], client.works(request))
    assert all(each.finished.usage.resumes == 1 for each in client.choices.values())


CASES = {
    "greedy": (asked(3, temperature=0), 1),
    "one token": (asked(3, pb.Stopping(max_tokens=1)), 3),
    "a grammar": (asked(3), 3),
    "a stop token": (asked(3, pb.Stopping(max_tokens=60, stop_token_ids=range(3, 20))), 3),
}
CASES["a grammar"][0].grammar.regex = "[a-d]{2,40}"


@pytest.mark.parametrize("case", CASES)
async def test_choices_are_as_alone(engines: list[Engine], folder: Path, case: str) -> None:
    request, num_different = CASES[case]
    request.prompt_logprobs = 0
    async with (
        in_process(engines[:1], engines[1:2]) as cluster,
        client_of(cluster, folder) as client,
        client.asking(request) as answer,
    ):
        await rest(answer)
    told = [client.choices[index].token_ids for index in range(3)]
    assert told == alone(engines[3], client.works(request))
    assert len({tuple(token_ids) for token_ids in told}) == num_different
    computed = [client.choices[index].finished.usage.prefill_tokens_computed for index in range(3)]
    assert computed == [1000, 8, 8], "the first scores the prompt"
