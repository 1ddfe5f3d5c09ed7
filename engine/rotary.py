"""The tables of rotary positions: cosine and sine of every position's angles."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_config import Llama3Rope, Rope


@dataclass(frozen=True)
class RotaryTables:
    """fp32 [window, rope.width / 2]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(rope: Rope, window: int, device: torch.device) -> RotaryTables:
    """Angles are position * frequency, in fp32 because that is what models are trained with."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width
    frequencies = 1.0 / (_divisors(rope) * rope.theta**exponents)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    angles = torch.outer(torch.arange(window, dtype=torch.float32), frequencies)
    return RotaryTables((angles.cos() * rope.amplitude).to(device), (angles.sin() * rope.amplitude).to(device))


def _divisors(rope: Rope) -> Tensor:
    return torch.tensor(rope.divisors or (1.0,) * (rope.width // 2), dtype=torch.float32)


def _stretch(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Llama 3.1: how often a frequency turns within the original window decides how much of it is kept."""
    turns = rope.original_window * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)
