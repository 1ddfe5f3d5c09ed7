"""What a model folder's config.json says, in our own words.

Read once, at loading: `read_config` finds the parser of the architecture, the parser takes the keys that it knows, and
whatever is left over must be known to mean nothing for inference. A key that nobody understands is refused by name:
a model that is computed almost right answers worse than one that does not start.

A new family is one parser function in `PARSERS`, and a field here for what it does differently.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pdserve.errors import ConfigError


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's stretched rotary frequencies: slow ones divided by `factor`, fast ones kept, between them blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_window: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama shape."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # tokens, prompt and completion together
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, the same as that of all value heads."""
        return self.num_kv_heads * self.head_dim


class _Keys:
    """The keys of one JSON object; remembers which of them somebody understood."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, value, "a whole number of at least 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def section(self, key: str) -> "_Keys":
        """An object inside this one; empty where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return _Keys(value, f"{self.where}: {key}")

    def require(self, key: str, only: Any) -> None:
        """Where the key is present, it has the one value that is implemented."""
        if self.get(key, only) != only:
            raise self.wrong(key, self.raw[key], f"{json.dumps(only)}, nothing else is implemented")

    def refuse_others(self) -> None:
        """Name the keys that nobody understood; null says nothing and passes."""
        others = sorted(key for key in self.raw.keys() - self.read - _IRRELEVANT if self.raw[key] is not None)
        if others:
            raise ConfigError(f"{self.where}: unknown {', '.join(others)}: refused, as it may change what is computed")

    def wrong(self, key: str, value: Any, allowed: str) -> ConfigError:
        """The one line that says what the key must be."""
        got = "it is missing" if value is None else f"it is {json.dumps(value)[:80]}"
        return ConfigError(f"{self.where}: {key} must be {allowed}; {got}")


def read_config(folder: Path) -> ModelConfig:
    """The model's config; ConfigError with one line where it cannot be served as written."""
    raw = _read_object(folder / "config.json")
    keys = _Keys(raw, str(folder / "config.json"))
    names = keys.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in PARSERS:
        raise keys.wrong("architectures", names, f"one of: {', '.join(sorted(PARSERS))}")
    config = PARSERS[names[0]](keys, _eos_token_ids(folder, keys))
    keys.refuse_others()
    return config


def _parse_llama(keys: _Keys, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """LlamaForCausalLM: Llama 2 and 3, SmolLM2. Defaults are those that an absent key has in this format."""
    for key, only in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_interleaved": False,
    }.items():
        keys.require(key, only)
    theta, scaling = _parse_rope(keys)
    num_heads, hidden_size = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=keys.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.whole("intermediate_size"),
        num_layers=keys.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.whole("num_key_value_heads", num_heads),
        head_dim=keys.whole("head_dim", max(hidden_size // num_heads, 1)),
        window=keys.whole("max_position_embeddings"),
        rms_eps=keys.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        eos_token_ids=eos_token_ids,
    )
    _check(config, keys)
    return config


def _check(config: ModelConfig, keys: _Keys) -> None:
    """Numbers that contradict one another."""
    if config.num_heads % config.num_kv_heads:
        raise keys.wrong("num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads} heads")
    if config.head_dim % 2:
        raise keys.wrong("head_dim", config.head_dim, "even, as rotary positions turn pairs")
    if any(token_id >= config.vocab_size for token_id in config.eos_token_ids):
        raise keys.wrong("eos_token_id", config.eos_token_ids, f"below vocab_size {config.vocab_size}")


def _parse_rope(keys: _Keys) -> tuple[float, Llama3Rope | None]:
    """Base and scaling of the rotary positions; older files have them apart, newer ones in `rope_parameters`."""
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    theta = keys.positive("rope_theta", 10000.0)
    theta = new.positive("rope_theta", theta)
    rope = new if new.raw else old
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise rope.wrong("rope_type", kind, 'one of: "default", "llama3"')
    scaling = _parse_llama3_rope(rope) if kind == "llama3" else None
    rope.refuse_others()
    return theta, scaling


def _parse_llama3_rope(rope: _Keys) -> Llama3Rope:
    return Llama3Rope(
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_window=rope.whole("original_max_position_embeddings"),
    )


def _eos_token_ids(folder: Path, keys: _Keys) -> tuple[int, ...]:
    """From generation_config.json, which goes first where it exists and names one, else from config.json."""
    found = keys.get("eos_token_id")
    if (folder / "generation_config.json").exists():
        found = _read_object(folder / "generation_config.json").get("eos_token_id") or found
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token_id) is not int or token_id < 0 for token_id in listed):
        raise keys.wrong("eos_token_id", found, "a token id or a list of them")
    return tuple(sorted(set(listed)))


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return raw


PARSERS: Mapping[str, Callable[[_Keys, tuple[int, ...]], ModelConfig]] = MappingProxyType(
    {"LlamaForCausalLM": _parse_llama}
)

# What libraries write beside the model's own numbers: training, defaults of generation, classifier heads, bookkeeping.
_WRITTEN_BESIDE = """
    _attn_implementation_autoset _from_model_config _name_or_path add_cross_attention attention_dropout
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id
    length_penalty max_length min_length model_type neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
_IRRELEVANT = frozenset(_WRITTEN_BESIDE.split())
