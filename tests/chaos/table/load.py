"""The requests that are under way at a fault, and their undisturbed answers.

A set's life: drawn by seed -> answered once on the cluster before any fault -> asked again, at each of its faults.

Talkers have short prompts and long answers: they decode. Readers have longer prompts and short answers: they queue, are
prefilled, and their KV is on its way. The first of them, one for each prefill worker, have long prompts: while a chunk
of these is computed the others gather behind it, and share the next pass. Greedy and seeded, text and token ids, with
and without stop strings.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.v1 import generation_pb2 as pb
from tests.chaos.table.record import Expected, Record, follow

AT_ONCE = 6
WORDS = (
    "a",
    "router",
    "sends",
    "prompts",
    "to",
    "one",
    "worker",
    "whose",
    "pages",
    "another",
    "had",
    "promised",
    "before",
)


@dataclass(frozen=True)
class Shape:
    """How many requests of which lengths, in tokens."""

    num_talkers: int = 7
    num_readers: int = 11
    talker_tokens: int = 350
    reader_prompt: tuple[int, int] = (80, 120)
    num_long: int = 2
    long_prompt: int = 900  # more than a chunk
    reader_tokens: int = 24
    vocabulary: tuple[int, int] = (3, 500)  # token ids that prompts are drawn from


SLOWER = Shape(4, 8, 120, reader_prompt=(50, 90), long_prompt=280, reader_tokens=12, vocabulary=(100, 40_000))


@dataclass(frozen=True)
class Job:
    """A request and its undisturbed answer."""

    request: pb.GenerateRequest
    expected: Expected
    prompt_tokens: int
    is_talker: bool
    is_long: bool = False  # a reader that is computed in several passes

    def named(self, label: str) -> pb.GenerateRequest:
        """The request under the label that ledgers will show."""
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        request.request_id = label
        return request


@dataclass(frozen=True)
class _Draft:
    request: pb.GenerateRequest
    is_talker: bool
    wants_stop: bool
    is_long: bool = False


async def make_sets(address: str, shape: Shape, num_sets: int) -> list[list[Job]]:
    """So many sets with their undisturbed answers."""
    return [await _make_set(address, _drafts(shape, random.Random(seed))) for seed in range(num_sets)]


async def _make_set(address: str, drafts: Sequence[_Draft]) -> list[Job]:
    records = await answers(address, [draft.request for draft in drafts])
    stopping = [index for index, draft in enumerate(drafts) if draft.wants_stop]
    for index in stopping:
        drafts[index].request.stopping.stop.extend(late_text(records[index].text))
    again = await answers(address, [drafts[index].request for index in stopping])
    for index, record in zip(stopping, again, strict=True):
        records[index] = record
    return [_job(draft, record) for draft, record in zip(drafts, records, strict=True)]


def _job(draft: _Draft, record: Record) -> Job:
    expected = Expected.of(record)
    prompt_tokens = record.finished.usage.prompt_tokens if record.finished else 0
    return Job(draft.request, expected, prompt_tokens, draft.is_talker, draft.is_long)


async def answers(address: str, requests: Sequence[pb.GenerateRequest]) -> list[Record]:
    """All of them, a few at once."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, request: pb.GenerateRequest) -> Record:
        record = Record(str(index))
        async with limit:
            await follow(address, request, record)
        return record

    return list(await asyncio.gather(*(one(index, request) for index, request in enumerate(requests))))


def late_text(text: str) -> list[str]:
    """A stop string that comes for the first time near the end; none where the text is too short."""
    start = len(text) * 9 // 10
    lengths = (n for n in range(2, 40) if text.find(text[start : start + n]) == start and start + n < len(text))
    return [text[start : start + length] for length in lengths][:1]


def _drafts(shape: Shape, draw: random.Random) -> list[_Draft]:
    talkers = [_talker(shape, draw, number) for number in range(shape.num_talkers)]
    return talkers + [_reader(shape, draw, number) for number in range(shape.num_readers)]


def _talker(shape: Shape, draw: random.Random, number: int) -> _Draft:
    request = pb.GenerateRequest(text=" ".join(draw.choices(WORDS, k=16)))
    return _Draft(_finish(request, shape.talker_tokens, draw, number), is_talker=True, wants_stop=number % 3 == 1)


def _reader(shape: Shape, draw: random.Random, number: int) -> _Draft:
    is_long = number < shape.num_long
    length = shape.long_prompt if is_long else draw.randint(*shape.reader_prompt)
    request = pb.GenerateRequest()
    if number % 3 == 2:
        request.text = " ".join(draw.choices(WORDS, k=length // 3))
    else:
        request.token_ids.ids.extend(draw.randrange(*shape.vocabulary) for _ in range(length))
    _finish(request, shape.reader_tokens, draw, number)
    return _Draft(request, is_talker=False, wants_stop=number % 3 == 1, is_long=is_long)


def _finish(request: pb.GenerateRequest, max_tokens: int, draw: random.Random, number: int) -> pb.GenerateRequest:
    """Every other one greedy."""
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    request.sampling.temperature = float(number % 2)
    request.sampling.seed = draw.getrandbits(63)
    return request
