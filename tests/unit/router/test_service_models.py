"""Models and tokenizing; and what is refused before any worker is asked."""

import grpc
from google.rpc import error_details_pb2

from pdserve.v1 import generation_pb2 as pb
from tests.unit.router.served import Served, detail, failure


async def test_unknown_and_early_models(served: Served) -> None:
    assert (await failure(served.generate(model="gpt"))).code() is grpc.StatusCode.NOT_FOUND
    assert (await failure(served.generate(model="early"))).code() is grpc.StatusCode.UNAVAILABLE
    for call in (served.stub.GetModel(pb.GetModelRequest(model="gpt")),
                 served.stub.Tokenize(pb.TokenizeRequest(model="gpt", text="x")),
                 served.stub.Detokenize(pb.DetokenizeRequest(model="gpt"))):  # fmt: skip
        assert (await failure(call)).code() is grpc.StatusCode.NOT_FOUND


async def test_a_bad_field_is_named_in_the_details(served: Served) -> None:
    error = await failure(served.generate(sampling=pb.Sampling(top_p=2)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, "at most 1" in violation.description) == ("sampling.top_p", True)
    assert detail(error, error_details_pb2.ErrorInfo).reason == "InvalidRequest"
    assert served.pipeline.work == []


async def test_models(served: Served) -> None:
    model = (await served.stub.GetModel(pb.GetModelRequest())).model
    assert (model.name, model.fingerprint, model.vocab_size, model.context_window) == ("toy", "f00d", 512, 64)
    assert (list(model.eos_token_ids), model.dtype, model.exact, model.has_chat_template) == (
        [2],
        "float32",
        True,
        True,
    )
    assert list((await served.stub.ListModels(pb.ListModelsRequest())).models) == [model]


async def test_tokenize_and_back(served: Served) -> None:
    text = "the café 👩"
    tokens = (await served.stub.Tokenize(pb.TokenizeRequest(text=text))).tokens
    assert b"".join(token.piece for token in tokens) == text.encode()
    assert all(text.encode()[token.start : token.end] == token.piece for token in tokens)
    ids = [token.id for token in tokens]
    assert (await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == text


async def test_tokenize_a_chat(served: Served) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    tokens = (await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))).tokens
    request = pb.DetokenizeRequest(token_ids=[token.id for token in tokens])
    assert (await served.stub.Detokenize(request)).text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_bad_input_of_the_small_calls(served: Served) -> None:
    error = await failure(served.stub.Tokenize(pb.TokenizeRequest()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = await failure(served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 600])))
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "token_ids[1]"
