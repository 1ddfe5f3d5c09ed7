"""Text and ids of a model folder: what goes in comes back, and every piece knows its bytes."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pdserve.errors import ConfigError, InvalidRequest
from router.chat import Message
from router.tokenizer import LONG_TEXT_BYTES, TextModel, TextSettings, in_thread_if_long
from tests.toy_tokenizer import TOY_BOS_ID, TOY_VOCAB_SIZE, toy_tokenizer, write_toy_tokenizer

TOY = TextModel(toy_tokenizer())
TEXTS = ["the cat sat", "café", "日本語", "👩‍👩‍👧 family", "a\n\n  b\t", "", " ", "é" * 5, "2026 3.14159 1,000,000"]


def sentencepiece_like() -> Tokenizer:
    """A tokenizer that is not byte-level: spaces are ▁, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text_and_offsets_are_theirs(text: str) -> None:
    data = text.encode()
    pieces = TOY.pieces(text)
    assert b"".join(piece.piece for piece in pieces) == data
    assert [data[piece.start : piece.end] for piece in pieces] == [piece.piece for piece in pieces]
    assert [piece.id for piece in pieces] == TOY.encode(text)
    assert TOY.decode(TOY.encode(text)) == text


@given(st.text())
@settings(max_examples=200)
def test_pieces_of_any_text(text: str) -> None:
    pieces = TOY.pieces(text)
    assert b"".join(piece.piece for piece in pieces) == text.encode()
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces)][:-1]


def test_a_character_split_over_tokens_has_its_true_bytes() -> None:
    assert [(piece.piece, piece.start, piece.end) for piece in TOY.pieces("é")] == [(b"\xc3", 0, 1), (b"\xa9", 1, 2)]


@given(st.lists(st.integers(0, TOY_VOCAB_SIZE + 5)))
@settings(max_examples=300)
def test_token_bytes_agree_with_decode(ids: list[int]) -> None:
    data = b"".join(TOY.token_bytes(token_id) for token_id in ids)
    assert data.decode(errors="replace") == TOY.decode(ids, skip_special_tokens=False)


def test_special_tokens_and_holes() -> None:
    assert TOY.special_ids == {0, 1, 2}
    assert TOY.token_text(2) == "<|im_end|>"
    assert TOY.decode([2]) == ""
    assert TOY.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert TOY.token_bytes(TOY_VOCAB_SIZE) == b""
    assert TOY.encode("<|im_end|>") == [2]


def test_an_added_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken("<日 x>", normalized=False)])
    model = TextModel(tokenizer)
    assert b"".join(piece.piece for piece in model.pieces("a<日 x>b")) == "a<日 x>b".encode()


def test_a_normalizer_that_changes_the_text_leaves_offsets_in_the_original() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    text = "e\u0301x"  # NFC: two code points become one
    pieces = TextModel(tokenizer).pieces(text)
    assert [piece.piece for piece in pieces] == [b"\xc3", b"\xa9", b"x"]
    assert (pieces[2].start, pieces[2].end) == (3, 4)
    assert all(piece.start < piece.end <= 3 for piece in pieces[:2])


def test_a_tokenizer_without_byte_alphabet() -> None:
    model = TextModel(sentencepiece_like())
    assert not model.byte_level
    assert model.decode(model.encode("ab é 日")) == "ab é 日"
    assert model.token_text(model.encode("a")[0]) == " a"
    assert model.token_bytes(3 + 0xE6) == b"\xe6"
    pieces = model.pieces("é日")
    assert [(piece.start, piece.end) for piece in pieces][-4:] == [(0, 2), (2, 5), (2, 5), (2, 5)]
    assert b"".join(piece.piece for piece in pieces[-3:]) == "日".encode()


@pytest.mark.parametrize(("add_bos_token", "in_file", "added"), [
    (None, False, False), (False, False, False), (True, False, True),
    (None, True, True), (False, True, False), (True, True, True),
])  # fmt: skip
def test_bos_comes_once_where_the_model_wants_it(add_bos_token: bool | None, in_file: bool, added: bool) -> None:
    tokenizer = toy_tokenizer()
    if in_file:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", TOY_BOS_ID)]
        )
    model = TextModel(tokenizer, TextSettings(bos_token="<|im_start|>", add_bos_token=add_bos_token))
    expected = [TOY_BOS_ID] * added + toy_tokenizer().encode("abc").ids
    assert model.encode("abc") == expected
    pieces = model.pieces("abc")
    assert [piece.id for piece in pieces] == expected
    assert b"abc"[pieces[-1].start : pieces[-1].end] == pieces[-1].piece
    assert not added or (pieces[0].start, pieces[0].end) == (0, 0)


def test_a_folder_with_template_and_tokens(tmp_path: Path) -> None:
    write_toy_tokenizer(tmp_path)
    model = TextModel.load(tmp_path)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.has_chat_template
    assert model.render_chat([Message("user", "hi")]) == prompt
    ids = model.encode_chat([Message("user", "hi")])
    assert model.decode(ids, skip_special_tokens=False) == prompt
    assert ids.count(TOY_BOS_ID) == 2
    assert [piece.id for piece in model.chat_pieces([Message("user", "hi")])] == ids


def test_a_template_file_wins_and_tokens_may_be_objects(tmp_path: Path) -> None:
    write_toy_tokenizer(tmp_path)
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": None, "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert TextModel.load(tmp_path).render_chat([Message("user", "x")]) == "<|im_start|>x"


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    write_toy_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert TextModel.load(tmp_path).render_chat([Message("user", "x")]) == "yes"


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = TextModel.load(tmp_path)
    assert model.encode("x" * 10) == TOY.encode("x" * 10)
    assert model.encode("x") == TOY.encode("x")


def test_a_folder_without_tokenizer_knows_only_ids(tmp_path: Path) -> None:
    model = TextModel.load(tmp_path)
    assert model.tokenizer is None
    assert model.token_text(5) == ""
    for use in (lambda: model.encode("a"), lambda: model.decode([1]), lambda: model.pieces("a")):
        with pytest.raises(InvalidRequest, match="token_ids"):
            use()
    with pytest.raises(InvalidRequest, match="chat template"):
        model.encode_chat([Message("user", "a")])


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer_config.json", "[]"),
                          ("tokenizer_config.json", "{"), ("chat_template.jinja", "{% if %}")],
)  # fmt: skip
def test_bad_files_are_config_errors(tmp_path: Path, name: str, content: str) -> None:
    write_toy_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError):
        TextModel.load(tmp_path)


async def test_long_texts_leave_the_event_loop() -> None:
    here = threading.get_ident()
    assert await in_thread_if_long(LONG_TEXT_BYTES, threading.get_ident) == here
    assert await in_thread_if_long(LONG_TEXT_BYTES + 1, threading.get_ident) != here


@given(st.text("the cat 2026 éß日本語👩🏽\n\t{}()", max_size=60))  # it has no tokens for some control characters
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_demo_model_gives_text_back(smollm2_text: TextModel, text: str) -> None:
    assert smollm2_text.decode(smollm2_text.encode(text), skip_special_tokens=False) == text
    assert b"".join(piece.piece for piece in smollm2_text.pieces(text)) == text.encode()


@pytest.fixture(scope="module")
def smollm2_text(smollm2_folder: Path) -> TextModel:
    return TextModel.load(smollm2_folder)


def test_pre_tokenizers_are_the_librarys_business() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert b"".join(piece.piece for piece in TextModel(tokenizer).pieces("in 2026")) == b"in 2026"


def test_a_text_beyond_all_windows_is_refused_before_it_is_tokenized() -> None:
    text = TextModel(toy_tokenizer())
    with pytest.raises(InvalidRequest, match="500001 characters, at most 500000"):
        text.encode("a" * 500_001)
