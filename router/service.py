"""The public gRPC service of a router: text in, text out.

    Generate: request -> plan (validation) -> tokens (pipeline) -> deltas (Answer) -> the client

Whatever ends a call early (client gone, deadline, stop string, fault) closes the pipeline's generator before anything
else happens, and with it both legs of the request. `context.write` waits until gRPC has taken the message, and only
then the next token is asked for: this module holds one token per request, and what a slow client leaves unread stays
with the pipeline, bounded by the request's `max_tokens`.
"""
# ruff: noqa: N802 (gRPC names its methods so)

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pdserve.errors import InvalidRequest, ProtocolError
from pdserve.request import Candidate, Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc
from router import call, validation
from router.record import RequestRecord
from router.text_stream import TextStream
from router.tokenizer import Piece, TextModel, in_thread_if_long
from router.validation import Plan, ServedModel


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
        async with call.reporting(context, label):
            model = self._models.find(request.model)
            await call.cancelled_once(context, self._serve(request, model, label, record, context))

    async def _serve(
        self,
        request: pb.GenerateRequest,
        model: ServedModel,
        label: str,
        record: RequestRecord,
        context: call.Context,
    ) -> None:
        plan = await in_thread_if_long(validation.prompt_size(request), validation.plan, request, model, label)
        record.prompt_tokens = plan.work.prompt_length
        await self._answer(Answer(plan, model), record, context)

    async def _answer(self, answer: "Answer", record: RequestRecord, context: call.Context) -> None:
        last = pb.Delta()
        plan = answer.plan
        async with call.closing(self._pipeline.generate(plan.work, plan.priority, record)) as tokens:
            async for token in tokens:
                if token.number == 0:
                    await call.write(context, pb.GenerateResponse(started=answer.started()))
                last = answer.delta(token)
                if answer.finished is not None:
                    break
                await call.write(context, pb.GenerateResponse(delta=last))
        if answer.finished is None:
            raise ProtocolError(f"request {plan.work.label!r}: the tokens ended without a reason")
        record.finished = asyncio.get_running_loop().time()
        await call.write(context, pb.GenerateResponse(delta=last))
        await call.write(context, pb.GenerateResponse(finished=_finished(answer.finished, record)))

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
            validation.check_token_ids("token_ids", request.token_ids, model.card.vocab_size)
            ids = list(request.token_ids)
            text = await in_thread_if_long(len(ids), model.text.decode, ids, skip_special_tokens=False)
            return pb.DetokenizeResponse(text=text)


class Answer:
    """What the client is told, token by token.

    The ids of a stop string's tokens are sent, its text is not. A token that ends the completion as end-of-sequence has
    an id and no text; a stop token id keeps its text.
    """

    def __init__(self, plan: Plan, model: ServedModel) -> None:
        self.plan = plan
        self.finished: pb.Finished | None = None  # set by the token that ends the completion
        self._model = model
        self._text = TextStream(model.text, plan.stop)

    def started(self) -> pb.Started:
        """What a client keeps to resume."""
        work, card = self.plan.work, self._model.card
        return pb.Started(
            request_id=work.label,
            model=card.name,
            seed=work.sampling.seed,
            model_fingerprint=card.fingerprint,
            prompt_tokens=work.prompt_length,
            exact=card.exact,
        )

    def delta(self, token: Token) -> pb.Delta:
        """The token's delta; the last one carries all text that was withheld."""
        delta = pb.Delta(token_number=token.number, text=self._advance(token), token_ids=[token.token_id])
        if self.plan.work.top_logprobs:
            delta.top_logprobs.append(_top_logprobs(token.top_logprobs, self._model.text))
        return delta

    def _advance(self, token: Token) -> str:
        is_eos = token.finish == "stop_token" and token.token_id in self.plan.eos_token_ids
        text, matched = "", None
        if not is_eos:
            step = self._text.push(token.token_id)
            text, matched = step.text, step.matched
        if token.finish and matched is None:
            step = self._text.finish()
            text, matched = text + step.text, step.matched
        if matched is not None:
            self.finished = _stopped(pb.StopMatch(stop_string=matched))
        elif token.finish:
            self.finished = self._ending(token, is_eos)
        return text

    def _ending(self, token: Token, is_eos: bool) -> pb.Finished:
        if is_eos:
            return _stopped(pb.StopMatch(eos_token_id=token.token_id))
        if token.finish == "stop_token":
            return _stopped(pb.StopMatch(stop_token_id=token.token_id))
        match = pb.StopMatch(max_tokens=self.plan.work.max_tokens)
        if self.plan.window_limited:
            match = pb.StopMatch(context_window=self.plan.window)
        return pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, stop_match=match)


def _stopped(match: pb.StopMatch) -> pb.Finished:
    return pb.Finished(finish_reason=pb.FINISH_REASON_STOP, stop_match=match)


def _finished(finished: pb.Finished, record: RequestRecord) -> pb.Finished:
    finished.usage.CopyFrom(record.usage())
    finished.timings.CopyFrom(record.timings())
    finished.workers.CopyFrom(record.workers())
    return finished


def _top_logprobs(candidates: Sequence[Candidate], text: TextModel) -> pb.TopLogprobs:
    return pb.TopLogprobs(
        candidates=[
            pb.TokenLogprob(token_id=one.token_id, logprob=one.logprob, text=text.token_text(one.token_id))
            for one in candidates
        ]
    )


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
