"""The public gRPC service of a router: text in, text out.

    Generate: request -> plan (validation) -> an Answer for every choice -> Choices: tokens (pipeline) -> the client

A request with `resume` begins behind the tokens that its client has: they go through the Answer silently, and to the
workers as if they were of an earlier attempt. Where they complete the answer already, no worker is asked.
"""
# ruff: noqa: N802 (gRPC names its methods so)

import asyncio
import secrets
from collections.abc import Sequence
from typing import Protocol

from pdserve.errors import InvalidRequest
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc
from router import call, validation
from router.answer import Answer
from router.checks import check_token_ids
from router.choices import Choices, Pipeline, plans
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


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """pdserve.v1.GenerationService."""

    def __init__(self, models: ModelSource, pipeline: Pipeline) -> None:
        self._models = models
        self._pipeline = pipeline

    # A coroutine that writes, not an async generator: gRPC leaves a cancelled generator to the garbage collector,
    # and the pages of the request with it.
    async def Generate(self, request: pb.GenerateRequest, context: call.Context) -> None:  # type: ignore[override]
        """Answer with `started` just before the first delta: until then a client may send the request again."""
        arrived = asyncio.get_running_loop().time()
        label = request.request_id or secrets.token_hex(8)
        async with call.reporting(context, label) as out:
            model = self._models.find(request.model)
            await call.cancelled_once(context, self._serve(request, model, label, arrived, out))

    async def _serve(
        self, request: pb.GenerateRequest, model: ServedModel, label: str, arrived: float, out: call.Out
    ) -> None:
        answers = await in_thread_if_long(validation.prompt_size(request), _begun, request, model, label)
        await Choices(self._pipeline, answers, arrived, out).run()

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


def _begun(request: pb.GenerateRequest, model: ServedModel, label: str) -> list[Answer]:
    first, *others = (Answer(plan, model) for plan in plans(validation.plan(request, model, label)))
    first.replay(request.resume.text_length)
    return [first, *others]


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
