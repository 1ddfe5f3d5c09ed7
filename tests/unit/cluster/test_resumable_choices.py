"""A client that reconnects in mid-answer of several choices: each goes on by itself, and all of them are one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc.aio
import pytest

from cluster.resumable import Limits, _Answer, _merged, generate
from pdserve.errors import ProtocolError, Unavailable
from pdserve.request import Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.choices import seed_of
from router.record import RequestRecord
from tests.unit.cluster.test_resumable import Wire, wire_to
from tests.unit.router.served import Served, serving, tokens_of

TEXTS = ["the café 👩 and then", "a", "not the same END at all", "the"]
INDEX_OF = {7: 0} | {seed_of(7, index): index for index in range(1, 4)}
REQUEST = pb.GenerateRequest(
    text="hello", n=4, sampling=pb.Sampling(seed=7), prompt_logprobs=0, stopping=pb.Stopping(stop=[" END"])
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as running:
        running.pipeline.clean_up_s = 0
        yield running


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    async with wire_to(served) as running:
        yield running


class Cutting:
    """Yields each choice's text; the first connection ends when this many tokens have come."""

    def __init__(self, served: Served, wire: Wire, after: int, finishing: int = -1) -> None:
        self._served, self._wire = served, wire
        self._left = after
        self._finishing = finishing  # this choice does not count
        self._begun: set[int] = set()
        self.is_cut = False

    async def __call__(self, work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        index = INDEX_OF[work.sampling.seed]
        is_first = index not in self._begun
        self._begun.add(index)
        async for token in tokens_of(self._served.text.encode(TEXTS[index]))(work, record):
            if is_first and index != self._finishing:
                await self._count()
            record.decode_steps = 1
            yield token

    async def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            self.is_cut = True
            asyncio.get_running_loop().call_later(0.1, self._wire.cut)  # what was written has arrived
        if self._left < 0:
            await asyncio.Event().wait()


async def read(address: str, limits: Limits | None = None) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(15):
        return [response async for response in generate(address, REQUEST, limits or Limits(timeout_s=20))]


def check(responses: list[pb.GenerateResponse], served: Served) -> None:
    """One stream, in which every choice is whole."""
    assert [each.started.seed for each in responses if each.HasField("started")] == list(INDEX_OF)
    token_ids, texts = [list[int]() for _ in TEXTS], [""] * len(TEXTS)
    for delta in (each.delta for each in responses if each.HasField("delta")):
        assert delta.token_number == len(token_ids[delta.index])
        token_ids[delta.index] += delta.token_ids
        texts[delta.index] += delta.text
    assert texts == [text.partition(" END")[0] for text in TEXTS]
    assert [served.text.decode(ids) for ids in token_ids] == [*TEXTS[:2], TEXTS[2].removesuffix(" at all"), TEXTS[3]]
    assert sorted(each.finished.index for each in responses if each.HasField("finished")) == [0, 1, 2, 3]


@pytest.mark.parametrize("after", [1, 2, 5, 9])
async def test_every_choice_goes_on(served: Served, wire: Wire, after: int) -> None:
    cutting = served.pipeline.script = Cutting(served, wire, after)
    responses = await read(wire.address)
    assert cutting.is_cut
    check(responses, served)
    finished = {each.finished.index: each.finished for each in responses if each.HasField("finished")}
    assert finished[0].usage.resumes == finished[2].usage.resumes == 1
    assert [work.prompt_logprobs for work in served.pipeline.work if INDEX_OF[work.sampling.seed]] == [None] * (
        len(served.pipeline.work) - 2
    )


async def test_a_finished_choice_is_not_asked_for_again(served: Served, wire: Wire) -> None:
    served.pipeline.script = Cutting(served, wire, 5, finishing=1)
    check(await read(wire.address), served)
    assert [INDEX_OF[work.sampling.seed] for work in served.pipeline.work].count(1) == 1


async def test_one_that_is_refused_is_the_end_of_all(served: Served, wire: Wire) -> None:
    cutting = Cutting(served, wire, 6)

    async def refused(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        if cutting.is_cut and work.sampling.seed == seed_of(7, 2):
            raise Unavailable("given up after 8 attempts")
        async for token in cutting(work, record):
            if cutting.is_cut and work.sampling.seed == 7:
                await asyncio.Event().wait()
            yield token

    served.pipeline.script = refused
    with pytest.raises(grpc.aio.AioRpcError, match="given up"):
        await read(wire.address, Limits(timeout_s=20, resume_for_s=0.3))
    async with asyncio.timeout(5):
        await served.pipeline.clean.wait()


def test_until_every_choice_has_started_all_is_asked_for_again_with_the_seed_that_was_told() -> None:
    answer = _Answer(pb.GenerateRequest(text="x", n=3))
    assert not answer.request().sampling.HasField("seed")
    told = [answer.add(pb.GenerateResponse(started=pb.Started(seed=5 + index, index=index))) for index in (0, 1)]
    assert not answer.has_begun
    assert (answer.request().sampling.seed, answer.request().n) == (5, 3)
    told += [answer.add(pb.GenerateResponse(started=pb.Started(seed=5 + index, index=index))) for index in (0, 1, 2)]
    assert told == [True, True, False, False, True]
    assert answer.has_begun
    rest = answer.unfinished()[2].request()
    assert (rest.resume.seed, rest.HasField("n"), rest.sampling.HasField("seed")) == (7, False, False)


def test_a_choice_that_never_started_is_a_fault_of_the_router() -> None:
    with pytest.raises(ProtocolError, match="choice 1"):
        _Answer(REQUEST).add(pb.GenerateResponse(delta=pb.Delta(index=1)))


async def counted(limit: int, open_streams: list[int], fails: bool = False) -> AsyncGenerator[int, None]:
    open_streams.append(limit)
    try:
        for number in range(limit):
            await asyncio.sleep(0)
            yield number
        if fails:
            raise Unavailable("no more")
    finally:
        open_streams.remove(limit)


async def test_streams_merged() -> None:
    open_streams: list[int] = []
    async with aclosing(_merged([counted(limit, open_streams) for limit in (3, 5)])) as items:
        assert sorted([item async for item in items]) == [0, 0, 1, 1, 2, 2, 3, 4]
    async with aclosing(_merged([counted(limit, open_streams) for limit in (10**6, 10**7)])) as items:
        assert [await anext(items) for _ in range(4)] == [0, 0, 1, 1]
        assert len(open_streams) == 2
    assert open_streams == []
    with pytest.raises(Unavailable):
        async for _ in _merged([counted(10**6, open_streams), counted(3, open_streams, fails=True)]):
            pass
    assert open_streams == []
