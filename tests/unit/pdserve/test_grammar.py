"""What a grammar may be, what is said where it is none, and how it is followed token by token."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.grammar import Grammars, Matcher, check_grammar
from pdserve.request import Sampling, WorkRequest
from pdserve.steering import Grammar, GrammarKind, Steering
from pdserve.wire import request_from_wire, request_to_wire
from tests.toy_tokenizer import TOY_EOS_ID, TOY_VOCAB_SIZE, toy_tokenizer, write_toy_tokenizer

PAIR = {
    "type": "object",
    "properties": {"z": {"type": "integer"}, "a": {"type": "integer"}},
    "required": ["z", "a"],
    "additionalProperties": False,
}


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("toy")
    write_toy_tokenizer(folder)
    return Grammars.load(folder, TOY_VOCAB_SIZE, (TOY_EOS_ID,))


def follows(matcher: Matcher, text: str) -> bool:
    return matcher.take(toy_tokenizer().encode(text).ids)


BAD: list[tuple[GrammarKind, str, str]] = [
    ("json_schema", "{", "is not JSON"),
    ("json_schema", "[" * 100_000, "is not JSON"),
    ("json_schema", "[]", "must be an object"),
    ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
    ("json_schema", '{"not": {"type": "string"}}', '["not"]'),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"type": "string", "format": "foo"}', "Unknown format: foo"),
    ("json_schema", '{"$ref": "#/nope"}', "/nope"),
    ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "http://127.0.0.1/x"),
    ("json_schema", '{"type": "string", "minLength": 2, "maxLength": 1}', "minLength (2)"),
    ("json_schema", '{"type": "object", "properties": {"a": false}, "required": ["a"]}', "'a' is unsatisfiable"),
    ("json_schema", '{"x-guidance": {"whitespace_pattern": 3}}', ""),
    ("json_schema", '{"x-guidance": {"whitespace_pattern": "("}}', ""),
    ("json_schema", '{"const": "\\ud800"}', ""),
    ("json_schema", '{"items": ' * 300 + "{}" + "}" * 300, "recursion limit"),
    ("regex", "(", "unclosed group"),
    ("regex", "(?=a)", "look-around"),
    ("lark", 'start: "a', "lexer error"),
    ("lark", "start: x", 'unknown name: "x"'),
    ("lark", "", ""),
]


@pytest.mark.parametrize(("kind", "text", "words"), BAD)
def test_what_is_no_grammar_is_refused_with_the_librarys_words(
    grammars: Grammars, kind: GrammarKind, text: str, words: str
) -> None:
    for use in (check_grammar, grammars.begin):  # the router's check, and the worker's
        with pytest.raises(InvalidRequest) as caught:
            use(Grammar(kind, text))
        assert caught.value.field == f"grammar.{kind}"
        assert words in caught.value.problem
        assert caught.value.problem


def test_what_no_text_can_follow_is_refused_where_the_vocabulary_is_known(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar.regex: no text can follow it: \w+$"):
        grammars.begin(Grammar("regex", r"[^\s\S]"))


def test_the_order_of_properties_is_the_schemas(grammars: Grammars) -> None:
    check_grammar(schema(PAIR))
    assert follows(grammars.begin(schema(PAIR)), '{"z":1,"a":2}')
    assert not follows(grammars.begin(schema(PAIR)), '{"a":1,"z":2}')


@pytest.mark.parametrize(
    ("options", "allowed"),
    [(None, 40), ({"whitespace_flexible": False}, 0), ({"whitespace_pattern": "[ ]{1,3}"}, 3), ({"lenient": True}, 40)],
)
def test_white_space_is_bounded_where_the_schema_does_not_say(
    grammars: Grammars, options: dict[str, Any] | None, allowed: int
) -> None:
    given = schema(PAIR | ({"x-guidance": options} if options else {}))
    for count in (allowed, allowed + 1):
        text = "{" + " " * count + '"z"' + " " * count + ":\n1,\n" if allowed == 40 else "{" + " " * count + '"z"'
        assert follows(grammars.begin(given), text) == (count == allowed)


def test_the_end_comes_where_nothing_can_follow(grammars: Grammars) -> None:
    matcher = grammars.begin(Grammar("regex", "ab*"))
    assert not matcher.may_end
    assert follows(matcher, "ab")
    assert (matcher.may_end, matcher.is_complete) == (True, False)
    matcher = grammars.begin(schema(PAIR))
    assert follows(matcher, '{"z":1,"a":2')
    assert (matcher.may_end, matcher.is_complete) == (False, False)
    assert follows(matcher, "}")
    assert (matcher.may_end, matcher.is_complete) == (True, True)


def test_a_copy_of_a_compiled_grammar_begins_at_the_beginning(grammars: Grammars) -> None:
    first = grammars.begin(schema(PAIR)).allowed()
    used = grammars.begin(schema(PAIR))
    assert follows(used, '{"z":')
    assert grammars.begin(schema(PAIR)).allowed() == first != used.allowed()
    for number in range(40):  # more than are kept
        assert follows(grammars.begin(Grammar("regex", f"a{number}")), f"a{number}")


def test_tokens_that_do_not_follow_are_a_problem_and_no_end(grammars: Grammars) -> None:
    matcher = grammars.begin(Grammar("regex", "ab"))
    assert not follows(matcher, "x")
    assert "x" in matcher.problem
    assert not matcher.is_complete


def test_a_model_without_usable_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        Grammars.load(tmp_path, 512, ()).begin(Grammar("regex", "a"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="tokenizer cannot be used"):
        Grammars.load(tmp_path, 512, ()).begin(Grammar("regex", "a"))
    write_toy_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="100 vs 512"):
        Grammars.load(tmp_path, 100, ()).begin(Grammar("regex", "a"))
    assert Grammars.load(tmp_path, 600, ()).begin(Grammar("regex", "a")).allowed()


def test_a_kind_from_the_future_is_refused_by_name(grammars: Grammars) -> None:
    wire = request_to_wire(WorkRequest("r", (5,), 1, Sampling(), 9, steering=Steering(grammar=Grammar("regex", "a"))))
    wire.steering.grammar.kind = "ebnf"
    steering = request_from_wire(wire).steering
    assert steering is not None
    assert steering.grammar is not None
    with pytest.raises(InvalidRequest, match="'ebnf' is unknown here"):
        grammars.begin(steering.grammar)
