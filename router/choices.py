"""The choices of one request: completions of one prompt, made side by side and told on one call.

    plan ──> a plan for each, with a seed of its own
    the first goes ahead ──a decode worker has its KV, or it has ended──> the others follow
    each: tokens (pipeline) -> deltas (Answer) -> `out`, in turns

A choice is a request of its own from its beginning. Those that follow find every whole page of the prompt on both
workers: they hold it together with the first, and compute and push only what its last, partly filled page holds, which
so is each one's own. Whatever befalls a choice, it resumes like any request, and knows nothing of the others.

Whatever ends a call early (client gone, deadline, a choice's error) closes the pipeline's generators of all choices
before anything else happens, a stop string that of its choice, and with them both legs of each. `out.write` waits until
gRPC has taken the message, and only then the choice's next token is asked for: here is one token per choice, and what a
slow client leaves unread stays with the pipeline, bounded by the request's `max_tokens`.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from pdserve.errors import AlreadyComplete, ProtocolError
from pdserve.request import Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router import call
from router.answer import Answer
from router.record import RequestRecord
from router.validation import Plan


class Pipeline(Protocol):
    """The way of a request over the workers."""

    def generate(self, work: WorkRequest, priority: int, record: RequestRecord) -> AsyncGenerator[Token, None]:
        """Yield the tokens, the last one with `finish`; closing the generator ends the request everywhere.

        Fills in `record` as it goes, also `record.add_token` before each token. Raises PdserveError.
        """
        ...


def plans(first: Plan) -> Iterator[Plan]:
    """One for each choice; the prompt is scored with the first alone."""
    yield first
    for index in range(1, first.num_choices):
        sampling = replace(first.work.sampling, seed=seed_of(first.work.sampling.seed, index))
        yield replace(first, work=replace(first.work, sampling=sampling, prompt_logprobs=None), index=index)


def seed_of(seed: int, index: int) -> int:
    """The seed of a choice after the first; generation.proto promises this formula."""
    mixed = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(mixed, digest_size=8).digest(), "little")


class Choices:
    """All that one call answers."""

    def __init__(self, pipeline: Pipeline, answers: Sequence[Answer], arrived: float, out: call.Out) -> None:
        self._pipeline = pipeline
        self._answers = answers
        self._out = out
        self._lead = _record(answers[0], arrived)
        self._prompt_is_there = asyncio.Event()

    async def run(self) -> None:
        """Write everything. Raises PdserveError: the first of any choice, when all others have cleaned up."""
        lead, *others = self._answers
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve(lead, self._lead))
                for answer in others:
                    group.create_task(self._follow(answer))
        except ExceptionGroup as errors:  # a call has one status: that of the first
            raise errors.exceptions[0] from None

    async def _follow(self, answer: Answer) -> None:
        await self._prompt_is_there.wait()  # ends with the first choice, whose error cancels this
        await self._serve(answer, _record(answer, self._lead.arrived, self._lead))

    async def _serve(self, answer: Answer, record: RequestRecord) -> None:
        try:
            last = await self._stream(answer, record) if answer.finished is None else await self._rest(answer)
        except AlreadyComplete:
            answer.complete()
            last = await self._rest(answer)
        if answer.finished is None:
            raise ProtocolError(f"request {answer.work.label!r}: the tokens ended without a reason")
        self._prompt_is_there.set()
        record.finished = asyncio.get_running_loop().time()
        if last.token_ids or last.text:
            await self._write_delta(last)
        await self._out.write(pb.GenerateResponse(finished=_finished(answer, answer.finished, record)))

    async def _stream(self, answer: Answer, record: RequestRecord) -> pb.Delta:
        """Write all deltas but the last, which is returned when both legs are free."""
        last, work = pb.Delta(), answer.work
        async with call.closing(self._pipeline.generate(work, answer.plan.priority, record)) as tokens:
            async for token in tokens:
                if token.number == work.num_emitted and record is self._lead:
                    await self._begin(answer)
                if record.decode_steps:  # decode has the KV of the prompt, and has published its pages
                    self._prompt_is_there.set()
                last = answer.delta(token)
                if answer.finished is not None:
                    break
                await self._write_delta(last)
        return last

    async def _begin(self, answer: Answer) -> None:
        """Just before the first delta: until then a client may send the request again."""
        for each in self._answers:
            await self._out.write(pb.GenerateResponse(started=each.started()))
        for scores in answer.prompt_logprobs(self._lead.prompt_scores):
            await self._out.write(pb.GenerateResponse(prompt_logprobs=scores))

    async def _rest(self, answer: Answer) -> pb.Delta:
        """For a client that has all tokens: it lacks the end of the text at most."""
        await self._out.write(pb.GenerateResponse(started=answer.started()))
        return answer.rest()

    async def _write_delta(self, delta: pb.Delta) -> None:
        await self._out.write(pb.GenerateResponse(delta=delta))
        self._out.delivered[delta.index] = delta.token_number + len(delta.token_ids)


def _record(answer: Answer, arrived: float, lead: RequestRecord | None = None) -> RequestRecord:
    work = answer.work
    return RequestRecord(arrived, lead, prompt_tokens=work.prompt_length, received_tokens=work.num_emitted)


def _finished(answer: Answer, finished: pb.Finished, record: RequestRecord) -> pb.Finished:
    finished.index = answer.plan.index
    finished.usage.CopyFrom(record.usage())
    finished.timings.CopyFrom(record.timings())
    finished.workers.CopyFrom(record.workers())
    return finished
