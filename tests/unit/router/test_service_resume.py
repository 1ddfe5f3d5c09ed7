"""A client that kept `started` and what it received goes on where it was, from any point of any answer."""

from collections.abc import Sequence
from typing import Any

import pytest

from pdserve import rpc
from pdserve.errors import InvalidRequest
from pdserve.v1 import generation_pb2 as pb
from router.record import RequestRecord
from tests.toy_tokenizer import TOY_EOS_ID
from tests.unit.router.served import Served, deltas, failure, text_of

PROMPT = "hello"


def resume_of(received: Sequence[pb.GenerateResponse], text_length: int | None = None) -> pb.Resume:
    """What the client sends back; by default it has all text that was sent."""
    started = received[0].started
    return pb.Resume(
        token_ids=[token_id for delta in deltas(received) for token_id in delta.token_ids],
        seed=started.seed,
        model_fingerprint=started.model_fingerprint,
        prompt_tokens=started.prompt_tokens,
        text_length=len(text_of(received)) if text_length is None else text_length,
    )


def ids_of(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token_id for delta in deltas(responses) for token_id in delta.token_ids]


BROKEN, NEWLINE = 175, 201  # tokens: the first byte of a character of four, and a line's end
ENDINGS = {
    "half characters": ("a é 👩 z", "length", None, pb.Stopping()),
    "a broken character at the end": ("a 👩", "length", BROKEN, pb.Stopping()),
    "end of sequence": ("the END", "stop_token", TOY_EOS_ID, pb.Stopping(stop=["D and more"])),
    "a stop token": ("the ", "stop_token", NEWLINE, pb.Stopping(stop_token_ids=[NEWLINE])),
    "a stop string": ("xa👩y END more", "length", None, pb.Stopping(stop=["👩y END", "zzz"])),
    "a stop string in the last token": ("abc", "length", None, pb.Stopping(stop=["c"])),
    "a complete grammar": ("the END", "grammar", None, pb.Stopping(stop=["D and more"])),
    "a complete grammar and a broken character": ("a 👩", "grammar", BROKEN, pb.Stopping()),
    "a stop token too early": ("ab\nc", "length", None, pb.Stopping(stop_token_ids=[NEWLINE], min_tokens=3)),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_from_every_point_it_becomes_the_same_answer(served: Served, ending: str) -> None:
    text, finish, last, stopping = ENDINGS[ending]
    ids, served.pipeline.clean_up_s = served.play(text, finish, last), 0
    if finish == "length":
        stopping.max_tokens = len(ids)
    grammar = pb.Grammar(regex=".*") if finish == "grammar" else None
    asked = {"text": PROMPT, "stopping": stopping, "grammar": grammar}
    whole = await served.generate(**asked, sampling=pb.Sampling(seed=11))
    for cut in range(1, len(whole)):
        received = whole[:cut]
        for text_length in {0, len(text_of(received)) // 2, len(text_of(received))}:
            rest = await served.generate(**asked, resume=resume_of(received, text_length))
            assert text_of(received)[:text_length] + text_of(rest) == text_of(whole)
            assert ids_of(received) + ids_of(rest) == ids_of(whole)
            assert rest[0].started.seed == 11
            assert rest[-1].finished.stop_match == whole[-1].finished.stop_match
            assert rest[-1].finished.usage.completion_tokens == whole[-1].finished.usage.completion_tokens


async def test_the_workers_get_what_the_client_has(served: Served) -> None:
    ids = served.play("the café")
    whole = await served.generate(text="x " * 40, truncate_prompt_tokens=9)
    await served.generate(text="x " * 40, truncate_prompt_tokens=9, resume=resume_of(whole[:4]))
    first, second = served.pipeline.work
    assert second.token_ids == (*first.token_ids, *ids[:3])
    assert (second.prompt_length, second.num_emitted, second.sampling) == (9, 3, first.sampling)
    assert second.max_tokens == first.max_tokens


async def test_token_numbers_go_on(served: Served) -> None:
    ids = served.play("the café")
    whole = await served.generate()
    rest = deltas(await served.generate(resume=resume_of(whole[:3])))
    assert [delta.token_number for delta in rest] == list(range(2, len(ids)))


async def test_a_complete_answer_asks_no_worker(served: Served) -> None:
    served.play("ab EN", "stop_token", TOY_EOS_ID)
    stopping = pb.Stopping(stop=["b END"])
    whole = await served.generate(stopping=stopping)
    rest = await served.generate(stopping=stopping, resume=resume_of(whole[:-1], text_length=1))
    assert [each.WhichOneof("event") for each in rest] == ["started", "delta", "finished"]
    assert (rest[1].delta.text, list(rest[1].delta.token_ids)) == ("b EN", [])
    rest = await served.generate(stopping=stopping, resume=resume_of(whole[:-1]))
    assert [each.WhichOneof("event") for each in rest] == ["started", "finished"]
    assert len(served.pipeline.work) == 1
    usage = rest[-1].finished.usage
    assert (usage.completion_tokens, usage.prefill_tokens_computed, usage.decode_steps) == (len(ids_of(whole)), 0, 0)


async def test_a_long_answer_is_replayed_in_a_thread(served: Served) -> None:
    served.play("the " * 10)
    whole = await served.generate(truncate_prompt_tokens=1, text="the " * 3000)
    rest = await served.generate(truncate_prompt_tokens=1, text="the " * 3000, resume=resume_of(whole[:5]))
    assert text_of(whole[:5]) + text_of(rest) == text_of(whole)


@pytest.mark.parametrize(
    ("change", "stopping", "field", "words"),
    [
        ({"model_fingerprint": "beef"}, {}, "resume.model_fingerprint", "'f00d'"),
        ({"model_fingerprint": ""}, {}, "resume.model_fingerprint", "'f00d'"),
        ({"prompt_tokens": 4}, {}, "resume.prompt_tokens", "the prompt has"),
        ({"token_ids": [40, 512]}, {}, "resume.token_ids[1]", "0 to 511"),
        ({"token_ids": [40] * 4}, {"max_tokens": 3}, "resume.token_ids", "at most 3 tokens"),
        ({"token_ids": [40, TOY_EOS_ID, 40]}, {}, "resume.token_ids[1]", "ends the completion (eos_token_id)"),
        ({"token_ids": [9, 40]}, {"stop_token_ids": [9]}, "resume.token_ids[0]", "(stop_token_id)"),
        ({"token_ids": "ab c"}, {"stop": ["b"]}, "resume.token_ids[1]", "(stop_string)"),
        ({"token_ids": "ab", "text_length": 3}, {}, "resume.text_length", "has 2 characters"),
        ({"token_ids": "ab", "text_length": 2}, {"stop": ["bc"]}, "resume.text_length", "has 1 characters"),
    ],
)  # fmt: skip
async def test_what_does_not_fit_names_the_field(
    served: Served, change: dict[str, Any], stopping: dict[str, Any], field: str, words: str
) -> None:
    if isinstance(change.get("token_ids"), str):
        change = {**change, "token_ids": [served.text.encode(character)[0] for character in change["token_ids"]]}
    length = len(served.text.encode(PROMPT))
    resume = pb.Resume(**{"seed": 1, "model_fingerprint": "f00d", "prompt_tokens": length, **change})
    error = rpc.error_of(await failure(served.generate(text=PROMPT, resume=resume, stopping=pb.Stopping(**stopping))))
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert words in error.problem
    assert served.pipeline.work == []


async def test_the_seed_is_the_one_of_resume(served: Served) -> None:
    served.play("ab")
    resume = pb.Resume(seed=2**64 - 1, model_fingerprint="f00d", prompt_tokens=len(served.text.encode(PROMPT)))
    same = pb.Sampling(seed=2**64 - 1)
    for sampling in (None, same):
        assert (await served.generate(resume=resume, sampling=sampling))[0].started.seed == 2**64 - 1
    error = rpc.error_of(await failure(served.generate(resume=resume, sampling=pb.Sampling(seed=0))))
    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.seed"


def test_usage_counts_what_the_client_brought_along() -> None:
    record = RequestRecord(arrived=0.0, received_tokens=5, resumes=2)
    record.add_token(1.0)
    record.add_token(2.0)
    assert (record.usage().completion_tokens, record.usage().resumes) == (7, 2)
    assert record.timings().tpot_ms == 1000
