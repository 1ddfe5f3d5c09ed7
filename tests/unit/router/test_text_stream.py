"""Streaming text equals decoding all at once, cut at the stop string that is complete first, for any tokens."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.text_stream import StopFinder, TextStream
from router.tokenizer import TextModel
from tests.toy_tokenizer import TOY_VOCAB_SIZE, toy_tokenizer

TOY = TextModel(toy_tokenizer())


def fallback_model() -> TextModel:
    """Not byte-level: ids 0-255 are bytes, then words."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "▁a", "b", "▁", "日", "é"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return TextModel(tokenizer)


FALLBACK = fallback_model()


def streamed(model: TextModel, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """Every part as it comes, the flushed one last, and what matched."""
    stream = TextStream(model, stop)
    parts = []
    for token_id in ids:
        step = stream.push(token_id)
        parts.append(step.text)
        if step.matched is not None:
            return parts, step.matched
    step = stream.finish()
    return [*parts, step.text], step.matched


def expected(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The same by reading the whole text character by character."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            matched = max(ending, key=len)
            return text[: end - len(matched)], matched
    return text, None


# Often ordinary text in odd tokens, sometimes any tokens at all.
TOY_IDS = st.one_of(
    st.lists(st.integers(0, TOY_VOCAB_SIZE + 3), max_size=40),
    st.text("aeéb日👩 th", max_size=20).map(TOY.encode),
    st.lists(st.sampled_from([*TOY.encode("é日👩abt"), 0, 2]), max_size=20),
)
STOPS = st.lists(st.text("aeéb日 th\ufffd", min_size=1, max_size=4), max_size=4).map(tuple)


@given(TOY_IDS)
@settings(max_examples=400)
def test_parts_joined_are_the_text(ids: list[int]) -> None:
    parts, matched = streamed(TOY, ids)
    assert "".join(parts) == TOY.decode(ids)
    assert matched is None


@given(TOY_IDS, STOPS)
@settings(max_examples=800)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(ids: list[int], stop: tuple[str, ...]) -> None:
    parts, matched = streamed(TOY, ids, stop)
    assert ("".join(parts), matched) == expected(TOY.decode(ids), stop)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), max_size=5), st.randoms())
@settings(max_examples=400)
def test_the_result_does_not_depend_on_where_text_is_cut(text: str, stop: list[str], random: object) -> None:
    finder = StopFinder(stop)
    parts, matched, rest = [], None, text
    while rest and matched is None:
        length = random.randint(1, 4)  # type: ignore[attr-defined]
        step = finder.push(rest[:length])
        rest, matched = rest[length:], step.matched
        parts.append(step.text)
    assert ("".join(parts) + ("" if matched else finder.flush()), matched) == expected(text, tuple(stop))


def test_no_half_characters() -> None:
    ids = TOY.encode("é👩")
    assert len(ids) == 6
    assert streamed(TOY, ids)[0] == ["", "é", "", "", "", "👩", ""]


def test_an_incomplete_character_is_replaced_only_at_the_end() -> None:
    ids = TOY.encode("a👩")[:-1]
    assert streamed(TOY, ids)[0] == ["a", "", "", "", "\ufffd"]
    assert TOY.decode(ids) == "a\ufffd"


def test_special_tokens_have_no_text() -> None:
    assert streamed(TOY, [*TOY.encode("a"), 1, 2, *TOY.encode("b")])[0] == ["a", "", "", "b", ""]


def test_a_stop_string_over_token_and_character_borders() -> None:
    parts, matched = streamed(TOY, TOY.encode("xé日yz"), ("é日y",))
    assert ("".join(parts), matched) == ("x", "é日y")


def test_only_a_possible_beginning_is_withheld() -> None:
    stream = TextStream(TOY, ("abcd",))
    steps = [stream.push(TOY.encode(character)[0]).text for character in "xabcabxy"]
    assert steps == ["x", "", "", "", "abc", "", "abx", "y"]


def test_withheld_text_comes_at_the_end() -> None:
    stream = TextStream(TOY, ("\n\nUser:",))
    given_out = "".join(stream.push(token_id).text for token_id in TOY.encode("hi\n\nUs"))
    assert given_out == "hi"
    assert stream.finish().text == "\n\nUs"


@pytest.mark.parametrize(
    ("text", "stop", "result"),
    [
        ("abcd", ("bcd", "c"), ("ab", "c")),  # "c" is complete first
        ("abcd", ("bc", "c"), ("a", "bc")),  # both end at the same place: the longer one
        ("abcd", ("ab", "abc"), ("", "ab")),
        ("aab", ("ab",), ("a", "ab")),
        ("abab", ("b",), ("a", "b")),
    ],
)
def test_which_match_wins(text: str, stop: tuple[str, ...], result: tuple[str, str]) -> None:
    whole = StopFinder(stop).push(text)
    assert (whole.text, whole.matched) == result
    finder, parts, matched = StopFinder(stop), "", None
    for character in text:
        if matched is None:
            step = finder.push(character)
            parts, matched = parts + step.text, step.matched
    assert (parts, matched) == result


def test_a_model_without_tokenizer_has_no_text() -> None:
    assert streamed(TextModel(), [1, 2, 3]) == (["", "", "", ""], None)


@given(st.text("ab é日👩", max_size=20))
@settings(max_examples=200)
def test_byte_fallback_gives_whole_characters(text: str) -> None:
    ids = [token_id for character in text for token_id in character.encode()]
    parts, _ = streamed(FALLBACK, ids)
    assert "".join(parts) == FALLBACK.decode(ids)
    assert "\ufffd" not in "".join(parts)


@given(st.lists(st.integers(0, 261), max_size=60))
@settings(max_examples=300)
def test_any_tokens_stream_through_the_library(ids: list[int]) -> None:
    parts, _ = streamed(FALLBACK, ids)  # garbage may be shown differently than at once, but never fails or stalls
    words = [text for text in "".join(parts).split("\ufffd") if text]
    assert "".join(words).count("日") >= ids.count(260)


def test_babble_costs_no_more_than_text() -> None:
    continuation = TOY.encode("é")[1]
    stream = TextStream(TOY)
    text = "".join(stream.push(continuation).text for _ in range(5000)) + stream.finish().text
    assert text == "\ufffd" * 5000
    library = TextStream(FALLBACK)
    assert "".join(library.push(0xA9).text for _ in range(500)) + library.finish().text == "\ufffd" * 500


@given(st.lists(st.integers(0, 49151), max_size=40), STOPS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_demo_model_streams_what_it_decodes(smollm2_text: TextModel, ids: list[int], stop: tuple[str, ...]) -> None:
    parts, matched = streamed(smollm2_text, ids, stop)
    assert ("".join(parts), matched) == expected(smollm2_text.decode(ids), stop)


@pytest.fixture(scope="module")
def smollm2_text(smollm2_folder: Path) -> TextModel:
    return TextModel.load(smollm2_folder)
