"""Structured output of one engine: valid from the first token on, ended by its grammar, the same from any cut."""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from engine.load import Engine
from engine.pilot import Pilot, pilot_of
from engine.sampler import Step, sample
from pdserve.errors import AlreadyComplete, InvalidRequest, NoTokenLeft
from pdserve.grammar import Grammars
from pdserve.request import Token, WorkRequest
from pdserve.steering import Grammar, GrammarKind, Steering
from tests.json_schemas import random_schema
from tests.structured import TOKENIZER, complete_all, structured, structured_engine, text_of
from tests.toy_tokenizer import TOY_EOS_ID, TOY_VOCAB_SIZE

ROW = torch.zeros(TOY_VOCAB_SIZE)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return structured_engine(tmp_path_factory.mktemp("toy"), num_pages=50 * 19)


@pytest.mark.timeout(240)
def test_200_schemas_validate_first_token_included_and_from_any_cut(engine: Engine) -> None:
    num_escapes = 0
    for first in range(0, 200, 50):
        works = [structured(random_schema(seed), seed) for seed in range(first, first + 50)]
        completions = complete_all(engine, works)
        cuts = []
        for seed, completion in enumerate(completions, first):
            ids = [token.token_id for token in completion]
            assert completion[-1].finish in ("grammar", "stop_token")
            jsonschema.validate(json.loads(text_of(ids)), random_schema(seed))
            inside = escapes(ids)
            num_escapes += len(inside)
            cuts.append(inside[0] if inside else random.Random(seed).randrange(len(ids)))
        resumed = [
            work.resumed([token.token_id for token in completion[:cut]])
            for work, completion, cut in zip(works, completions, cuts, strict=True)
        ]
        rests = [completion[cut:] for completion, cut in zip(completions, cuts, strict=True)]
        assert complete_all(engine, resumed) == rests
    assert num_escapes >= 20


def escapes(token_ids: list[int]) -> list[int]:
    """Cuts between the backslash and the rest of an escape."""
    texts = [text_of(token_ids[:count]) for count in range(1, len(token_ids))]
    return [count for count, text in enumerate(texts, 1) if (len(text) - len(text.rstrip("\\"))) % 2]


def work(kind: GrammarKind, text: str, *, ends: bool = True, **changes: Any) -> WorkRequest:
    steering = Steering(grammar=Grammar(kind, text), **changes.pop("steering", {}))
    stops = frozenset({TOY_EOS_ID} if ends else ())
    return replace(structured({}, 0), steering=steering, stop_token_ids=stops, **changes)


def pilot(engine: Engine, asked: WorkRequest) -> Pilot:
    made = pilot_of(asked, TOY_VOCAB_SIZE, engine.grammars)
    assert made is not None
    return made


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def left(steered: Pilot) -> set[str]:
    """What may come next."""
    ids = np.flatnonzero(steered.steer(ROW.numpy()) > -np.inf)
    return {"EOS" if token_id == TOY_EOS_ID else text_of([token_id]) for token_id in ids.tolist()}


def test_eos_may_come_where_the_text_is_whole_and_it_ends_the_request(engine: Engine) -> None:
    steered = pilot(engine, work("regex", "a-*"))
    assert left(steered) == {"a"}
    steered.take(Token(0, ids_of("a")[0]))
    assert left(steered) == {"EOS", "-"}
    assert left(pilot(engine, work("regex", "a-*", ends=False).resumed(ids_of("a")))) == {"-"}
    assert left(pilot(engine, work("regex", "a-*", min_tokens=3).resumed(ids_of("a-")))) == {"-"}


@pytest.mark.parametrize("changes", [{}, {"ends": False}, {"min_tokens": 9}])
def test_a_complete_grammar_ends_the_request(engine: Engine, changes: dict[str, Any]) -> None:
    asked = work("lark", 'start: "yes" | "no"', **changes)
    steered, tokens = pilot(engine, asked), list[Token]()
    while not (tokens and tokens[-1].finish):
        (token,) = sample(ROW[None], [Step(asked, len(tokens), steered)])
        tokens.append(steered.take(token))
    assert text_of([token.token_id for token in tokens]) in ("yes", "no")
    assert tokens[-1].finish == "grammar"
    with pytest.raises(AlreadyComplete):
        pilot(engine, asked.resumed([token.token_id for token in tokens]))


def test_the_limit_ends_it_first(engine: Engine) -> None:
    asked = work("regex", "b", max_tokens=1)
    (token,) = sample(ROW[None], [Step(asked, 0, pilot(engine, asked))])
    assert pilot(engine, asked).take(token).finish == "length"


def test_the_empty_text_is_one_end_of_sequence_token(engine: Engine) -> None:
    assert left(pilot(engine, work("regex", ""))) == {"EOS"}
    with pytest.raises(NoTokenLeft):
        pilot(engine, work("regex", "", ends=False)).check()


def test_lists_and_grammar_together_may_leave_nothing(engine: Engine) -> None:
    steered = pilot(engine, work("regex", "a-+c", steering={"banned_token_ids": tuple(ids_of("-"))}))
    steered.check()
    steered.take(Token(0, ids_of("a")[0]))
    with pytest.raises(NoTokenLeft, match="token 1 of the completion"):
        steered.check()


def test_a_grammar_without_end_is_no_endless_loop(engine: Engine) -> None:
    text = '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'
    (tokens,) = complete_all(engine, [work("json_schema", text, max_tokens=20)])
    assert tokens[-1].finish == "length"


def test_a_grammar_that_nothing_can_follow_is_refused(engine: Engine) -> None:
    cases: list[tuple[GrammarKind, str]] = [("json_schema", '{"$ref": "#"}'), ("regex", r"[^\s\S]")]
    for kind, text in cases:
        with pytest.raises(InvalidRequest, match=f"grammar.{kind}: no text can follow it"):
            pilot(engine, work(kind, text))


def test_tokens_of_a_resume_must_follow_the_grammar(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="first request") as caught:
        pilot(engine, work("regex", "ab").resumed(ids_of("ax")))
    assert caught.value.field == "resume.token_ids"


def test_a_first_token_that_does_not_follow_is_a_problem(engine: Engine) -> None:
    steered = pilot(engine, work("regex", "abc"))
    steered.take(Token(0, ids_of("x")[0]))
    with pytest.raises(NoTokenLeft, match="x"):
        steered.check()


def test_without_a_tokenizer_there_are_no_grammars() -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        pilot_of(work("regex", "a"), TOY_VOCAB_SIZE, Grammars())
