"""oneDNN's operators are called as they want to be: checked in fp32, which every CPU has."""

import pytest
import torch
from torch.nn import functional

from engine.kernels import choose_kernels
from engine.onednn import OneDnnLinear, has_bf16_units


@pytest.mark.parametrize("rows", [1, 7, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_torch(rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(48, 40, generator=generator), torch.randn(rows, 40, generator=generator)
    bias = torch.randn(48, generator=generator) if with_bias else None
    torch.testing.assert_close(OneDnnLinear(weight, bias)(x), functional.linear(x, weight, bias))


@pytest.mark.skipif(not has_bf16_units(), reason="this CPU has no bf16 units")
def test_equals_torch_in_bf16() -> None:
    weight, x = torch.randn(48, 40).bfloat16(), torch.randn(7, 40)
    expected = functional.linear(x.bfloat16().float(), weight.float())
    torch.testing.assert_close(OneDnnLinear(weight)(x), expected, atol=0.05, rtol=0.02)


def test_fast_keeps_the_exact_kernels_where_they_are_the_fastest() -> None:
    kernels = choose_kernels(torch.device("cpu"), fast=True)
    assert kernels.exact is not has_bf16_units()
    assert choose_kernels(torch.device("cpu")).exact
