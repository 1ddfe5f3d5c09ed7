"""Norm, activation and rotary embedding: equal to their twins, and row by row."""

import pytest
import torch
from torch.nn import functional

from engine.kernels import choose_kernels, torch_kernels

CPU = torch.device("cpu")
WIDTHS = [1, 15, 16, 48, 100, 576]


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    x, weight, eps = torch.randn(33, width) * 10, torch.randn(width), 1e-5
    y = choose_kernels(CPU).rms_norm(x, weight, eps)
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch_kernels().rms_norm(x, weight, eps), y, atol=1e-5, rtol=1e-5)
    alone = [choose_kernels(CPU).rms_norm(x[i : i + 1], weight, eps) for i in range(33)]
    assert torch.equal(torch.cat(alone), y)


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(width: int) -> None:
    gate_up = torch.randn(33, 2 * width) * 20
    y = choose_kernels(CPU).silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(y.double(), gate * gate.sigmoid() * up, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch_kernels().silu_mul(gate_up), y, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat([choose_kernels(CPU).silu_mul(row[None]) for row in gate_up]), y)


@pytest.mark.parametrize("width", WIDTHS)
def test_gelu_mul(width: int) -> None:
    gate_up = torch.randn(33, 2 * width) * 3
    y = choose_kernels(CPU).gelu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(y.double(), functional.gelu(gate, approximate="tanh") * up, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch_kernels().gelu_mul(gate_up), y, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat([choose_kernels(CPU).gelu_mul(row[None]) for row in gate_up]), y)


def test_activations_of_extremes() -> None:
    gate = torch.tensor([-1e30, -200.0, -100.0, -88.0, 0.0, 100.0, 1e30, float("inf")])
    gate_up, kernels = torch.cat([gate, torch.ones(8)])[None], choose_kernels(CPU)
    torch.testing.assert_close(kernels.silu_mul(gate_up)[0], functional.silu(gate), atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(kernels.gelu_mul(gate_up)[0], gate.clamp(min=0), atol=1e-30, rtol=1e-6)


def test_norm_heads_in_place_of_a_view() -> None:
    qkv, weight = torch.randn(7, 5, 48) * 3, torch.randn(3, 48)
    before, twin = qkv.clone(), qkv.clone()
    choose_kernels(CPU).norm_heads(qkv[:, :3], weight, 1e-6)
    torch_kernels().norm_heads(twin[:, :3], weight, 1e-6)
    torch.testing.assert_close(qkv, twin, atol=1e-6, rtol=1e-5)
    heads = [choose_kernels(CPU).rms_norm(before[:, head], weight[head], 1e-6) for head in range(3)]
    assert torch.equal(qkv[:, :3], torch.stack(heads, 1))
    assert torch.equal(qkv[:, 3:], before[:, 3:])
    with pytest.raises(ValueError, match="expected weights"):
        choose_kernels(CPU).norm_heads(qkv, weight, 1e-6)


def test_a_part_of_a_head_may_turn() -> None:
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(12) / 12))
    positions, x = torch.tensor([3, 49], dtype=torch.int32), torch.randn(2, 3, 32)
    whole, twin = x[..., :24].clone(), x.clone()
    expected = x.clone()
    choose_kernels(CPU).rotate(x, angles.cos(), angles.sin(), positions)
    torch_kernels().rotate(twin, angles.cos(), angles.sin(), positions)
    choose_kernels(CPU).rotate(whole, angles.cos(), angles.sin(), positions)
    expected[..., :24] = whole
    assert torch.equal(x, expected)
    torch.testing.assert_close(twin, expected, atol=1e-6, rtol=1e-5)


def test_rotate_in_place_of_a_view() -> None:
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(16) / 16))
    positions, qkv = torch.tensor([0, 49, 3, 4], dtype=torch.int32), torch.randn(4, 5, 32)
    before, twin = qkv.clone(), qkv.clone()
    choose_kernels(CPU).rotate(qkv[:, :3], angles.cos(), angles.sin(), positions)
    torch_kernels().rotate(twin[:, :3], angles.cos(), angles.sin(), positions)
    torch.testing.assert_close(qkv, twin, atol=1e-6, rtol=1e-5)
    turned = torch.view_as_complex(torch.stack(before[:, :3].chunk(2, -1), -1).contiguous())
    turned = turned * torch.polar(torch.ones(4, 1, 16), angles[positions.long()][:, None])
    torch.testing.assert_close(qkv[:, :3], torch.cat([turned.real, turned.imag], -1), atol=1e-5, rtol=1e-5)
    assert torch.equal(qkv[:, 3:], before[:, 3:])


def test_rotate_refuses_what_it_cannot_do() -> None:
    rotate, table, zero = choose_kernels(CPU).rotate, torch.ones(8, 8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(IndexError, match="rotary tables"):
        rotate(torch.randn(1, 2, 16), table, table, zero + 8)
    with pytest.raises(ValueError, match="tables of shapes"):
        rotate(torch.randn(1, 2, 8), table, table, zero)
    with pytest.raises(ValueError, match="in place"):
        rotate(torch.randn(1, 2, 32)[:, :, ::2], table, table, zero)
