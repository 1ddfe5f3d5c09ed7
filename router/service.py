"""The public gRPC service of a router: text in, text out.

    Generate: request -> plan (validation) -> tokens (pipeline) -> deltas (Answer) -> the client

A request with `resume` begins behind the tokens that its client has: they go through the Answer silently, and to the
workers as if they were of an earlier attempt. Where they complete the answer already, no worker is asked.

Whatever ends a call early (client gone, deadline, stop string, fault) closes the pipeline's generator before anything
else happens, and with it both legs of the request. `out.write` waits until gRPC has taken the message, and only
then the next token is asked for: this module holds one token per request, and what a slow client leaves unread stays
with the pipeline, bounded by the request's `max_tokens`.
"""
# ruff: noqa: N802 (gRPC names its methods so)

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pdserve.errors import AlreadyComplete, InvalidRequest, ProtocolError
from pdserve.request import Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc
from router import call, validation
from router.answer import Answer
from router.checks import check_token_ids
from router.record import RequestRecord
from router.tokenizer import Piece, TextModel, in_thread_if_long
from router.validation import ServedModel


class ModelSource(Protocol):
    """What is served here."""

    def find(self, name: str) -> ServedModel:
        """The model of this name, or the only one for "". Raises ModelNotFound; Unavailable while workers lack."""
        ...

    def all(self) -> Sequence[ServedModel]:
        """Every model, by name."""
        ...


class Pipeline(Protocol):
    """The way of a request over the workers."""

    def generate(self, work: WorkRequest, priority: int, record: RequestRecord) -> AsyncGenerator[Token, None]:
        """Yield the tokens, the last one with `finish`; closing the generator ends the request everywhere.

        Fills in `record` as it goes, also `record.add_token` before each token. Raises PdserveError.
        """
        ...


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """pdserve.v1.GenerationService."""

    def __init__(self, models: ModelSource, pipeline: Pipeline) -> None:
        self._models = models
        self._pipeline = pipeline

    # A coroutine that writes, not an async generator: gRPC leaves a cancelled generator to the garbage collector,
    # and the pages of the request with it.
    async def Generate(self, request: pb.GenerateRequest, context: call.Context) -> None:  # type: ignore[override]
        """Answer with `started` just before the first delta: until then a client may send the request again."""
        record = RequestRecord(arrived=asyncio.get_running_loop().time())
        label = request.request_id or secrets.token_hex(8)
        async with call.reporting(context, label) as out:
            model = self._models.find(request.model)
            await call.cancelled_once(context, self._serve(request, model, label, record, out))

    async def _serve(
        self,
        request: pb.GenerateRequest,
        model: ServedModel,
        label: str,
        record: RequestRecord,
        out: call.Out,
    ) -> None:
        answer = await in_thread_if_long(validation.prompt_size(request), _begun, request, model, label)
        record.prompt_tokens, record.received_tokens = answer.work.prompt_length, answer.work.num_emitted
        try:
            last = await self._stream(answer, record, out) if answer.finished is None else await _rest(answer, out)
        except AlreadyComplete:
            answer.complete()
            last = await _rest(answer, out)
        if answer.finished is None:
            raise ProtocolError(f"request {label!r}: the tokens ended without a reason")
        record.finished = asyncio.get_running_loop().time()
        if last.token_ids or last.text:
            await _write_delta(out, last)
        await out.write(pb.GenerateResponse(finished=_finished(answer.finished, record)))

    async def _stream(self, answer: Answer, record: RequestRecord, out: call.Out) -> pb.Delta:
        """Write all deltas but the last, which is returned when both legs are free."""
        last, work = pb.Delta(), answer.work
        async with call.closing(self._pipeline.generate(work, answer.plan.priority, record)) as tokens:
            async for token in tokens:
                if token.number == work.num_emitted:
                    await out.write(pb.GenerateResponse(started=answer.started()))
                    for scores in answer.prompt_logprobs(record.prompt_scores):
                        await out.write(pb.GenerateResponse(prompt_logprobs=scores))
                last = answer.delta(token)
                if answer.finished is not None:
                    break
                await _write_delta(out, last)
        return last

    async def GetModel(self, request: pb.GetModelRequest, context: call.Context) -> pb.GetModelResponse:
        """One model."""
        async with call.reporting(context, "GetModel"):
            return pb.GetModelResponse(model=_model(self._models.find(request.model)))

    async def ListModels(
        self,
        request: pb.ListModelsRequest,  # noqa: ARG002
        context: call.Context,
    ) -> pb.ListModelsResponse:
        """All models."""
        async with call.reporting(context, "ListModels"):
            return pb.ListModelsResponse(models=map(_model, self._models.all()))

    async def Tokenize(self, request: pb.TokenizeRequest, context: call.Context) -> pb.TokenizeResponse:
        """Tokens of a text or chat; offsets of a chat count in the text that its template makes of it."""
        async with call.reporting(context, "Tokenize"):
            text = self._models.find(request.model).text
            pieces = await in_thread_if_long(validation.prompt_size(request), _pieces, request, text)
            return pb.TokenizeResponse(tokens=[_token_piece(piece) for piece in pieces])

    async def Detokenize(self, request: pb.DetokenizeRequest, context: call.Context) -> pb.DetokenizeResponse:
        """The text of token ids, special tokens included: what Tokenize took apart comes back whole."""
        async with call.reporting(context, "Detokenize"):
            model = self._models.find(request.model)
            check_token_ids("token_ids", request.token_ids, model.card.vocab_size)
            ids = list(request.token_ids)
            text = await in_thread_if_long(len(ids), model.text.decode, ids, skip_special_tokens=False)
            return pb.DetokenizeResponse(text=text)


def _begun(request: pb.GenerateRequest, model: ServedModel, label: str) -> Answer:
    answer = Answer(validation.plan(request, model, label), model)
    answer.replay(request.resume.text_length)
    return answer


async def _rest(answer: Answer, out: call.Out) -> pb.Delta:
    """For a client that has all tokens: it lacks the end of the text at most."""
    await out.write(pb.GenerateResponse(started=answer.started()))
    return answer.rest()


async def _write_delta(out: call.Out, delta: pb.Delta) -> None:
    await out.write(pb.GenerateResponse(delta=delta))
    out.delivered_tokens = delta.token_number + len(delta.token_ids)


def _finished(finished: pb.Finished, record: RequestRecord) -> pb.Finished:
    finished.usage.CopyFrom(record.usage())
    finished.timings.CopyFrom(record.timings())
    finished.workers.CopyFrom(record.workers())
    return finished


def _model(model: ServedModel) -> pb.Model:
    card = model.card
    return pb.Model(
        name=card.name,
        fingerprint=card.fingerprint,
        vocab_size=card.vocab_size,
        context_window=card.window,
        eos_token_ids=card.eos_token_ids,
        dtype=card.kv_layout.dtype,
        exact=card.exact,
        has_chat_template=model.text.has_chat_template,
    )


def _pieces(request: pb.TokenizeRequest, text: TextModel) -> list[Piece]:
    match request.WhichOneof("prompt"):
        case "text":
            return text.pieces(request.text)
        case "chat":
            return text.chat_pieces(validation.chat_messages(request.chat))
        case _:
            raise InvalidRequest("prompt", "is not set; send text or chat")


def _token_piece(piece: Piece) -> pb.TokenPiece:
    return pb.TokenPiece(id=piece.id, piece=piece.piece, start=piece.start, end=piece.end)
