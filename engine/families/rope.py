"""The rotary positions of a config.json.

Older files have `rope_theta` and `rope_scaling` apart, newer ones both in `rope_parameters`. Stretchings that depend on
how long the sequence is at the moment (dynamic, yarn's relatives) are refused: a token's key would not be a function of
its position.
"""

from engine.config_keys import Keys
from engine.model_config import Llama3Rope, Rope


def read_rope(keys: Keys, head_dim: int, theta: float) -> Rope:
    """Those of a file with one kind for all layers; `theta` where the file has none."""
    section, theta = rope_section(keys, theta)
    rope = rope_of(section, theta, head_dim)
    section.refuse_others()
    return rope


def rope_section(keys: Keys, theta: float) -> tuple[Keys, float]:
    """The object that describes it, and theta."""
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    theta = keys.positive("rope_theta", theta)
    section = new if new.raw else old
    return section, section.positive("rope_theta", theta)


def rope_kind(section: Keys) -> str:
    """Its name of the stretching."""
    return str(section.get("rope_type", section.get("type", "default")))


def rope_of(section: Keys, theta: float, width: int) -> Rope:
    """A kind that every family may have."""
    rope = Rope(theta, width)
    match kind := rope_kind(section):
        case "default":
            return rope
        case "linear":
            return Rope(theta, width, divisors=(section.positive("factor"),) * (width // 2))
        case "llama3":
            return Rope(theta, width, _llama3(section))
        case _:
            raise section.wrong("rope_type", kind, 'one of: "default", "linear", "llama3"')


def _llama3(section: Keys) -> Llama3Rope:
    return Llama3Rope(
        factor=section.positive("factor"),
        low_freq_factor=section.positive("low_freq_factor"),
        high_freq_factor=section.positive("high_freq_factor"),
        original_window=section.whole("original_max_position_embeddings"),
    )
