"""Structured output through the whole relay in one process, cut at tokens as a killed worker would cut it."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from engine.load import Engine
from pdserve.errors import AlreadyComplete, InvalidRequest, NoTokenLeft
from pdserve.request import Token, WorkRequest
from pdserve.steering import Grammar, Steering
from router.record import RequestRecord
from tests.inprocess import in_process, reference
from tests.json_schemas import random_schema
from tests.structured import TOKENIZER, structured, structured_engine, text_of
from tests.toy import toy_engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    folder: Path = tmp_path_factory.mktemp("toy")
    return [structured_engine(folder), toy_engine(folder), toy_engine(folder)]


def ids_of(work: WorkRequest, engine: Engine) -> list[int]:
    return [token.token_id for token in reference(engine, work)]


async def test_schemas_are_followed_over_both_legs_and_from_cuts(engines: list[Engine]) -> None:
    num_escapes = 0
    async with in_process(engines[:1], engines[1:2]) as cluster:
        for seed in range(12):
            schema = random_schema(seed)
            work = structured(schema, seed)
            tokens = await cluster.complete(work)
            assert tokens == reference(engines[2], work)
            ids = [token.token_id for token in tokens]
            jsonschema.validate(json.loads(text_of(ids)), schema)
            escapes = [cut for cut in range(1, len(ids)) if text_of(ids[:cut]).endswith("\\")]
            num_escapes += len(escapes)
            for cut in {*escapes[:1], len(ids) // 2, len(ids) - 1} - {0}:
                assert await cluster.complete(work.resumed(ids[:cut])) == tokens[cut:]
        await cluster.assert_clean()
    assert num_escapes >= 2


async def test_a_whole_answer_cannot_be_resumed(engines: list[Engine]) -> None:
    work = structured({"enum": [True]}, 1)
    ids = ids_of(work, engines[2])
    async with in_process(engines[:1], engines[1:2]) as cluster:
        with pytest.raises(AlreadyComplete):
            await cluster.complete(work.resumed(ids))
        with pytest.raises(InvalidRequest, match="do not follow the grammar"):
            await cluster.complete(work.resumed([9, 9]))
        await cluster.assert_clean()


@pytest.mark.parametrize(("text", "num_before"), [("!!-", 0), ("-!", 1), ("(-){2}!", 2), ("(-){7}!", 7)])
async def test_where_no_token_is_left_amid_an_answer_it_ends_with_the_reason(
    engines: list[Engine], text: str, num_before: int
) -> None:
    (mark,) = TOKENIZER.encode("!").ids
    steering = Steering(grammar=Grammar("regex", text), banned_token_ids=(mark,))
    work = replace(structured({}, 0), steering=steering)
    tokens: list[Token] = []
    async with in_process(engines[:1], engines[1:2]) as cluster:

        async def answer() -> None:
            async for token in cluster.pipeline.generate(work, 0, RequestRecord(arrived=0.0)):
                tokens.append(token)

        with pytest.raises(NoTokenLeft, match=f"token {num_before} of the completion"):
            await answer()
        await cluster.assert_clean()
    assert text_of([token.token_id for token in tokens]) == "-" * num_before
