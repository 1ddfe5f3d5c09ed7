"""A tiny tokenizer, so that a toy model with random weights can be served with text from end to end.

Byte-level BPE of exactly 512 ids: 3 special tokens, the 256 bytes, and 253 merges of frequent letter pairs. Every
string goes through unchanged (`decode(encode(x)) == x`), and every id that a toy model with 512 ids samples means
something.
The specials keep the ids that SmolLM2 gives them: 0 end of text, 1 `<|im_start|>` (bos), 2 `<|im_end|>` (eos).
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TOY_VOCAB_SIZE = 512
TOY_BOS_ID = 1
TOY_EOS_ID = 2
TOY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPACE = "Ġ"  # how byte-level BPE writes a space


def write_toy_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, which must exist."""
    toy_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": TOY_SPECIAL_TOKENS[TOY_BOS_ID],
        "eos_token": TOY_SPECIAL_TOKENS[TOY_EOS_ID],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": TOY_CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def toy_tokenizer() -> Tokenizer:
    """The tokenizer itself; the same every time."""
    vocabulary = {piece: index for index, piece in enumerate(toy_pieces())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=toy_merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOY_SPECIAL_TOKENS])
    return tokenizer


def toy_pieces() -> list[str]:
    """The text of every id, as byte-level BPE writes it."""
    merged = [left + right for left, right in toy_merges()]
    return [*TOY_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]


def toy_merges() -> list[tuple[str, str]]:
    """The merges, first ones first."""
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    pairs = [(consonant, vowel) for consonant in consonants for vowel in vowels]
    pairs += [(vowel, consonant) for vowel in vowels for consonant in consonants]
    pairs += [(_SPACE, letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    pairs += [
        ("t", "h"),
        ("s", "t"),
        ("n", "d"),
        ("th", "e"),
        (_SPACE, "the"),
        ("an", "d"),
        ("in", "g"),
        (_SPACE, _SPACE),
    ]
    pairs += [
        ("e", "e"),
        ("o", "o"),
        ("o", "u"),
        ("l", "l"),
        ("s", "s"),
        ("t", "t"),
        ("p", "p"),
        ("f", "f"),
        ("r", "r"),
    ]
    return pairs
