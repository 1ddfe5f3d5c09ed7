"""tokenizer.json and tokenizer_config.json out of the metadata of a GGUF file.

GGUF holds vocabulary, merges or scores, and token types, and of the pre-tokenizer only a name; how text is cut before
the merges apply has to be known here. A wrong cut still gives tokens that decode to the same text, only not the ones
that the model was trained on, so an unknown name is an error and no default is assumed.

Bytes that the vocabulary lacks (SmolLM2: a few control characters, and lead bytes of unused planes) are dropped, as the
original tokenizer drops them.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.gguf_file import GgufFile

_NORMAL = 1  # llama.cpp's types of tokens: made by merges,
_CONTROL, _USER_DEFINED = 3, 4  # and standing outside them
_SPACE = "▁"  # SentencePiece's


def write_tokenizer(source: GgufFile, folder: Path) -> None:
    """Write both files into `folder`; ConfigError for a kind of tokenizer that is not supported, or a corrupt one."""
    tokens = source.texts("tokenizer.ggml.tokens")
    build_tokenizer(source, tokens).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(source),
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos", "eos", "padding"):
        if f"tokenizer.ggml.{name}_token_id" in source.metadata:
            settings[f"{name.removesuffix('ding')}_token"] = _special(source, tokens, name)
    if "tokenizer.chat_template" in source.metadata:
        settings["chat_template"] = source.text("tokenizer.chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def build_tokenizer(source: GgufFile, tokens: list[str]) -> Tokenizer:
    """The tokenizer that `source` describes."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        source.fail("corrupt: two tokens of the vocabulary are the same")
    match source.text("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(source, vocabulary)
        case "llama":
            tokenizer = _sentence_piece(source, vocabulary)
        case kind:
            source.fail(f"tokenizer model {kind!r} is not supported (gpt2, byte-level BPE, and llama are)")
    tokenizer.add_tokens(_added_tokens(source, tokens))
    if _adds_bos(source):
        bos = _special(source, tokens, "bos")
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, vocabulary[bos])])
    return tokenizer


def _byte_level(source: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    """BPE over bytes, after a cut into words."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(source, vocabulary)))
    tokenizer.pre_tokenizer = _pre_tokenizer(source)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(source: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    """BPE of SentencePiece over characters, with spaces as a visible one; what it does not know becomes bytes."""
    if source.metadata.get("tokenizer.ggml.add_space_prefix", True):
        source.fail("tokenizer.ggml.add_space_prefix is not supported")
    unknown = _special(source, list(vocabulary), "unknown")
    merges = _merges_by_score(source, vocabulary)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges_by_score(source: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best tokens first: the file has scores instead of merges."""
    scores = source.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        source.fail(f"corrupt: {len(vocabulary)} tokens, but {len(scores)} scores")
    kinds = _token_kinds(source, len(vocabulary))
    normal = {token: index for token, index in vocabulary.items() if kinds[index] == _NORMAL}
    ways = [
        (-scores[index], normal[left], normal[right], left, right)
        for token, index in normal.items()
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in normal and right in normal
    ]
    return [way[3:] for way in sorted(ways)]


def _merges(source: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in source.texts("tokenizer.ggml.merges"):
        left, _, right = text.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            source.fail(f"corrupt: merge {text!r} is not made of tokens of the vocabulary")
        merges.append((left, right))
    return merges


def _pre_tokenizer(source: GgufFile) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known = {"gpt-2": words, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])}
    name = source.text("tokenizer.ggml.pre")
    if name not in known:
        source.fail(f"pre-tokenizer {name!r} is not supported ({', '.join(known)} are)")
    return known[name]


def _added_tokens(source: GgufFile, tokens: list[str]) -> list[AddedToken]:
    kinds = _token_kinds(source, len(tokens))
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _token_kinds(source: GgufFile, num_tokens: int) -> list[int]:
    kinds = source.integers("tokenizer.ggml.token_type")
    if len(kinds) != num_tokens:
        source.fail(f"corrupt: {num_tokens} tokens, but {len(kinds)} token types")
    return kinds


def _adds_bos(source: GgufFile) -> bool:
    return source.metadata.get("tokenizer.ggml.add_bos_token") is True


def _special(source: GgufFile, tokens: list[str], name: str) -> str:
    index = source.integer(f"tokenizer.ggml.{name}_token_id")
    if not 0 <= index < len(tokens):
        source.fail(f"corrupt: {name}_token_id {index} is outside the vocabulary of {len(tokens)} tokens")
    return tokens[index]
