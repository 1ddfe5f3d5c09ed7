"""What an answer consists of, from `started` to `finished`."""

from collections.abc import AsyncIterator

import pytest

from pdserve.request import Candidate, Scored, Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.record import RequestRecord
from tests.toy_tokenizer import TOY_EOS_ID
from tests.unit.router.served import Served, deltas, text_of, tokens_of


async def test_an_answer_from_start_to_finish(served: Served) -> None:
    ids = served.play("the café")
    responses = await served.generate(request_id="mine", sampling=pb.Sampling(seed=5), priority=-1)
    started, finished = responses[0].started, responses[-1].finished
    assert [response.WhichOneof("event") for response in responses] == ["started", *["delta"] * len(ids), "finished"]
    assert (started.request_id, started.model, started.seed) == ("mine", "toy", 5)
    assert (started.model_fingerprint, started.exact) == ("f00d", True)
    assert started.prompt_tokens == finished.usage.prompt_tokens == len(served.text.encode("hello"))
    assert text_of(responses) == "the café"
    assert [list(delta.token_ids) for delta in deltas(responses)] == [[token_id] for token_id in ids]
    assert [delta.token_number for delta in deltas(responses)] == list(range(len(ids)))
    assert finished.usage.completion_tokens == len(ids)
    assert finished.timings.total_ms >= finished.timings.ttft_ms
    assert served.pipeline.priorities == [-1]
    assert served.pipeline.closed.is_set()


async def test_half_characters_wait_and_the_last_delta_brings_them(served: Served) -> None:
    served.pipeline.script = tokens_of(served.text.encode("é👩")[:-1])
    assert [delta.text for delta in deltas(await served.generate())] == ["", "é", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("last", "finish", "stopping", "match", "reason"),
    [
        (TOY_EOS_ID, "stop_token", pb.Stopping(), pb.StopMatch(eos_token_id=TOY_EOS_ID), pb.FINISH_REASON_STOP),
        (
            TOY_EOS_ID,
            "stop_token",
            pb.Stopping(stop_token_ids=[TOY_EOS_ID], ignore_eos=True),
            pb.StopMatch(stop_token_id=TOY_EOS_ID),
            pb.FINISH_REASON_STOP,
        ),
        (9, "stop_token", pb.Stopping(stop_token_ids=[9]), pb.StopMatch(stop_token_id=9), pb.FINISH_REASON_STOP),
        (9, "grammar", pb.Stopping(max_tokens=9), pb.StopMatch(grammar=True), pb.FINISH_REASON_STOP),
        (9, "length", pb.Stopping(max_tokens=3), pb.StopMatch(max_tokens=3), pb.FINISH_REASON_LENGTH),
        (9, "length", pb.Stopping(max_tokens=999), pb.StopMatch(context_window=64), pb.FINISH_REASON_LENGTH),
        (TOY_EOS_ID, "length", pb.Stopping(max_tokens=3), pb.StopMatch(max_tokens=3), pb.FINISH_REASON_LENGTH),
    ],
)
async def test_why_it_ended(
    served: Served, last: int, finish: str, stopping: pb.Stopping, match: pb.StopMatch, reason: int
) -> None:
    served.play("ab", finish, last)
    finished = (await served.generate(stopping=stopping))[-1].finished
    assert (finished.stop_match, finished.finish_reason) == (match, reason)


async def test_eos_has_an_id_and_no_text(served: Served) -> None:
    ids = served.play("ab", "stop_token", TOY_EOS_ID)
    responses = await served.generate()
    assert text_of(responses) == "ab"
    assert [delta.token_ids[0] for delta in deltas(responses)] == ids


async def test_a_stop_token_keeps_its_text(served: Served) -> None:
    newline = served.text.encode("\n")[0]
    served.play("ab", "stop_token", newline)
    assert text_of(await served.generate(stopping=pb.Stopping(stop_token_ids=[newline]))) == "ab\n"


async def test_a_stop_string_ends_the_work_and_hides_its_text(served: Served) -> None:
    ids = served.play("xay END more and more")
    responses = await served.generate(stopping=pb.Stopping(stop=["zzz", "y END"]))
    assert text_of(responses) == "xa"
    assert responses[-1].finished.stop_match == pb.StopMatch(stop_string="y END")
    assert responses[-1].finished.finish_reason == pb.FINISH_REASON_STOP
    sent = [delta.token_ids[0] for delta in deltas(responses)]
    assert served.text.decode(sent) == "xay END"
    assert len(sent) == served.pipeline.yielded == responses[-1].finished.usage.completion_tokens < len(ids)
    assert served.pipeline.closed.is_set()


async def test_text_withheld_for_a_stop_string_comes_at_the_end(served: Served) -> None:
    served.play("ab EN", "stop_token", TOY_EOS_ID)
    responses = await served.generate(stopping=pb.Stopping(stop=["b END"]))
    assert text_of(responses) == "ab EN"
    assert deltas(responses)[-1].text == "b EN"


async def test_a_stop_string_in_the_last_token_wins_over_length(served: Served) -> None:
    served.play("ab")
    assert (await served.generate(stopping=pb.Stopping(stop=["b"])))[-1].finished.stop_match.stop_string == "b"


async def test_candidates_come_with_their_text(served: Served) -> None:
    served.play("é")
    first = deltas(await served.generate(top_logprobs=2))[0].top_logprobs
    assert len(first) == 1
    assert [candidate.text for candidate in first[0].candidates] == ["\ufffd"] * 2
    assert first[0].candidates[0].logprob == -0.5
    assert not deltas(await served.generate())[0].top_logprobs


async def test_the_plan_reaches_the_workers(served: Served) -> None:
    served.play("a")
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    responses = await served.generate(chat=chat, stopping=pb.Stopping(max_tokens=7))
    work = served.pipeline.work[0]
    assert served.text.decode(work.token_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert (work.max_tokens, work.label) == (7, responses[0].started.request_id)
    assert work.label


async def test_a_long_prompt_is_tokenized_too(served: Served) -> None:
    served.play("a")
    responses = await served.generate(text="the " * 3000, truncate_prompt_tokens=5)
    assert responses[0].started.prompt_tokens == 5


async def test_log_probabilities_name_their_tokens(served: Served) -> None:
    ids = served.play("the")
    (delta, *_) = deltas(await served.generate(logprobs=True))
    (step,) = delta.top_logprobs
    assert (step.chosen.token_id, step.chosen.text, step.chosen.logprob) == (
        ids[0],
        served.text.token_text(ids[0]),
        -0.5,
    )
    assert not step.candidates


async def test_the_prompts_scores_come_before_its_answer_in_messages_of_bounded_size(served: Served) -> None:
    scores = [Scored(Candidate(9, -1.5), (Candidate(8, -0.5),))] * 300

    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        record.prompt_scores = scores
        yield Token(0, 9, finish="length")

    served.pipeline.script = script
    responses = await served.generate(prompt_logprobs=1)
    events = [response.WhichOneof("event") for response in responses]
    assert events == ["started", *["prompt_logprobs"] * 3, "delta", "finished"]
    told = [response.prompt_logprobs for response in responses[1:4]]
    assert [(each.first_position, len(each.tokens)) for each in told] == [(1, 128), (129, 128), (257, 44)]
    assert (told[0].tokens[0].chosen.logprob, told[0].tokens[0].candidates[0].token_id) == (-1.5, 8)
