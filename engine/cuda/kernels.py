"""The set of kernels for CUDA: Triton's, and torch's matrix products.

Triton's are path-invariant by construction; torch's products choose their routine by the number of rows, so the set as
a whole is not. No routine waits for the device.
"""

from engine import linear
from engine.cuda import rows
from engine.cuda.attention import attend, write_kv
from engine.kernels import Kernels


def triton_kernels() -> Kernels:
    """For tensors on CUDA, or anywhere under Triton's interpreter."""
    return Kernels(
        name="triton",
        exact=False,
        linear=linear.TorchLinear,
        head=linear.TorchLinear,
        write_kv=write_kv,
        attend=attend,
        rms_norm=rows.rms_norm,
        norm_heads=rows.norm_heads,
        silu_mul=rows.silu_mul,
        gelu_mul=rows.gelu_mul,
        rotate=rows.rotate,
        capturable=True,
    )
