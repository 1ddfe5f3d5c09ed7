"""Linear layers: the bits of a row do not depend on the rows beside it."""

import pytest
import torch
from torch import Tensor

from engine.kernels import choose_kernels, torch_kernels

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
ODD_SHAPES = [(16, 1), (100, 37), (7, 576), (576, 1536), (33, 64)]  # [out, in]


def _weight(out: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(out)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_bits_do_not_depend_on_the_number_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear = choose_kernels(CPU).linear(_weight(*shape, dtype), torch.randn(shape[0]))
    x = torch.randn(512, shape[1])
    alone = torch.cat([linear(x[i : i + 1]) for i in range(512)])
    for num_rows in [*range(1, 41), 127, 128, 200, 512]:
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows]), num_rows
        assert torch.equal(linear(x[-num_rows:]), alone[-num_rows:]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_close_to_double_precision(shape: tuple[int, int], dtype: torch.dtype, with_bias: bool) -> None:
    weight, bias, x = _weight(*shape, dtype), torch.randn(shape[0]), torch.randn(19, shape[1])
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    for kernels in (choose_kernels(CPU), torch_kernels()):
        y = kernels.linear(weight, bias if with_bias else None)(x)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), expected, atol=3e-4, rtol=1e-5)


def test_long_sums_keep_their_digits() -> None:
    """Summed in one piece the error would be 4e-6."""
    weight, x = torch.rand(64, 8192), torch.rand(8, 8192)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(choose_kernels(CPU).linear(weight)(x).double(), expected, atol=0, rtol=1e-6)


def test_outputs_do_not_depend_on_what_is_stacked_beside_them() -> None:
    weight, x = _weight(100, 48, torch.bfloat16), torch.randn(5, 48)
    make = choose_kernels(CPU).linear
    parts = torch.cat([make(weight[:21])(x), make(weight[21:])(x)], dim=1)
    assert torch.equal(make(weight)(x), parts)


def test_rows_may_lie_apart() -> None:
    linear, wide = choose_kernels(CPU).linear(_weight(20, 30, torch.float32)), torch.randn(9, 100)
    assert torch.equal(linear(wide[:, 10:40]), linear(wide[:, 10:40].contiguous()))
    assert torch.equal(linear(wide.T[:7, :9].T[:, :7].repeat(1, 5)[:, :30]), linear(wide[:, :7].repeat(1, 5)[:, :30]))
    transposed = torch.randn(30, 9)
    assert torch.equal(linear(transposed.T), linear(transposed.T.contiguous()))


def test_bad_rows_stay_alone() -> None:
    linear, x = choose_kernels(CPU).linear(_weight(20, 30, torch.bfloat16)), torch.randn(9, 30)
    clean = linear(x)
    x[4] = float("nan")
    dirty = linear(x)
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_weights_are_copied() -> None:
    weight, x = _weight(32, 16, torch.float32), torch.randn(2, 16)
    linear = choose_kernels(CPU).linear(weight)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_no_rows_and_wrong_widths() -> None:
    linear = choose_kernels(CPU).linear(_weight(20, 30, torch.float32))
    assert linear(torch.empty(0, 30)).shape == (0, 20)
    with pytest.raises(ValueError, match="expected x of shape"):
        linear(torch.empty(2, 31))
