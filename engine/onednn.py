"""oneDNN's linear layers for `--fast`: a CPU with bf16 units (AMX, AVX512-BF16) computes bf16 several times faster.

Not path-invariant: above 128 rows the order of summation changes. The two operators are private to torch (inductor
calls them), so whoever asks for them asks `has_bf16_units` first, and without them keeps the exact kernels.
"""

import torch
from torch import Tensor

_BATCH_HINT = 1  # weights packed for one row are the fastest for decode, and no slower for many rows


def has_bf16_units() -> bool:
    """Whether oneDNN computes bf16 in hardware on this CPU."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a torch without oneDNN, or one that has renamed it
        return False


class OneDnnLinear:
    """See `engine.linear.Linear`; the inputs are rounded to the dtype of the weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.to(weight.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BATCH_HINT)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] fp32 to [T, out] fp32."""
        rounded = x.to(self._dtype).contiguous()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rounded, self._packed, self._bias, "none", [], "")
        return y.float()
