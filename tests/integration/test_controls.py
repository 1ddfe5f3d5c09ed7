"""Every control through the whole relay in one process: as one engine alone, and from every cut the same."""

from typing import Any

import pytest

from engine.load import Engine
from pdserve.request import Sampling, WorkRequest
from pdserve.steering import Steering
from router.record import RequestRecord
from tests.inprocess import in_process, reference
from tests.toy import toy_engine, write_toy_model

PROMPT = (5, 6, 7, 7, 380, 5, 11)
STEERINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"logit_bias": tuple((token_id, 8.0) for token_id in range(100, 104))},
    {"allowed_token_ids": (8, 9, 10, 11)},
    {"banned_token_ids": tuple(range(256))},
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    folder = write_toy_model(tmp_path_factory.mktemp("toy"))
    return [toy_engine(folder) for _ in range(3)]


def steered(steering: dict[str, Any], temperature: float) -> WorkRequest:
    return WorkRequest(
        "r", PROMPT, len(PROMPT), Sampling(temperature, top_k=2, seed=4), 16, steering=Steering(**steering)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_relay_steers_as_one_engine_does(engines: list[Engine], temperature: float) -> None:
    works = [steered(steering, temperature) for steering in STEERINGS]
    plain = WorkRequest("r", PROMPT, len(PROMPT), Sampling(temperature, top_k=2, seed=4), 16)
    async with in_process(engines[:1], engines[1:2]) as cluster:
        for work in works:
            tokens = await cluster.complete(work)
            assert tokens == reference(engines[2], work)
            assert tokens != reference(engines[2], plain)
            ids = [token.token_id for token in tokens]
            for cut in (1, 7, 15):
                assert await cluster.complete(work.resumed(ids[:cut])) == tokens[cut:]
        await cluster.assert_clean()


async def test_lists_and_penalties_do_what_they_say(engines: list[Engine]) -> None:
    async with in_process(engines[:1], engines[1:2]) as cluster:

        async def ids(steering: dict[str, Any]) -> list[int]:
            return [token.token_id for token in await cluster.complete(steered(steering, 1.0))]

        assert set(await ids(STEERINGS[4])) <= {8, 9, 10, 11}
        assert min(await ids(STEERINGS[5])) >= 256
        assert set(await ids({"logit_bias": ((77, 100.0),)})) == {77}
        once = await ids({"allowed_token_ids": tuple(range(8, 24)), "presence_penalty": 1e6})
        assert len(set(once)) == 16


async def test_scores_come_through_the_relay_and_are_not_lost_with_a_leg(engines: list[Engine]) -> None:
    work = WorkRequest("r", tuple(range(3, 90)), 87, Sampling(seed=4), 6, top_logprobs=3, prompt_logprobs=2)
    async with in_process(engines[:1], engines[1:2], chunk_tokens=32) as cluster:
        record = RequestRecord(arrived=0.0)
        tokens = await cluster.complete(work, record)
        assert tokens == reference(engines[2], work)
        assert all(token.logprob is not None and len(token.top_logprobs) == 3 for token in tokens)
        assert [score.chosen.token_id for score in record.prompt_scores] == list(work.token_ids[1:])
        again, resumed = RequestRecord(arrived=0.0), RequestRecord(arrived=0.0)
        await cluster.complete(work, again)
        assert again.prompt_scores == record.prompt_scores
        assert (again.cached_tokens, again.computed_tokens) == (0, 87)
        await cluster.complete(work.resumed([tokens[0].token_id]), resumed)
        assert list(resumed.prompt_scores) == []
