"""config.json, read once at loading.

`read_config` finds the family of the architecture, its parser takes the keys that it knows, and whatever is left over
must be known to mean nothing for inference. A key that nobody understands is refused by name.

A new family is one file in `engine/families/` and a line in `FAMILIES`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.config_keys import Keys
from engine.families import gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from engine.model_config import ModelConfig
from pdserve.errors import ConfigError

FAMILIES: Mapping[str, Callable[[Keys], ModelConfig]] = MappingProxyType(
    {
        "Gemma3ForCausalLM": gemma3.parse,
        "LlamaForCausalLM": llama.parse,
        "MistralForCausalLM": mistral.parse,
        "MixtralForCausalLM": mixtral.parse,
        "Phi3ForCausalLM": phi3.parse,
        "Qwen2ForCausalLM": qwen2.parse,
        "Qwen3ForCausalLM": qwen3.parse,
        "Qwen3MoeForCausalLM": qwen3_moe.parse,
    }
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


def read_config(folder: Path) -> ModelConfig:
    """The model's config; ConfigError with one line where it cannot be served as written."""
    keys = Keys(_read_object(folder / "config.json"), str(folder / "config.json"))
    names = keys.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
        raise keys.wrong("architectures", names, f"one of: {', '.join(sorted(FAMILIES))}")
    config = replace(FAMILIES[names[0]](keys), architecture=names[0], eos_token_ids=_eos_token_ids(folder, keys))
    keys.refuse_others(_IRRELEVANT)
    _check(config, keys)
    return config


def _check(config: ModelConfig, keys: Keys) -> None:
    """Numbers that contradict one another."""
    if config.num_heads % config.num_kv_heads:
        raise keys.wrong("num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads} heads")
    if config.head_dim % 2:
        raise keys.wrong("head_dim", config.head_dim, "even, as rotary positions turn pairs")
    if any(token_id >= config.vocab_size for token_id in config.eos_token_ids):
        raise keys.wrong("eos_token_id", config.eos_token_ids, f"below vocab_size {config.vocab_size}")


def _eos_token_ids(folder: Path, keys: Keys) -> tuple[int, ...]:
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
