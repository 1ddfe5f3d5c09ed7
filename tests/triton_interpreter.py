"""Triton's interpreter in the place of its compiler: kernels run on the CPU, program by program.

Two things of Triton 3.6's interpreter are repaired. It makes a number of an array of one element in a way that NumPy
has given up in 2.4; and its product of matrices takes the bits of bfloat16 for integers, and is NumPy's, in which a row
depends on its place. Here products are exact but for one rounding, so that a row's bits are its own, as on a GPU.
"""

import os
from typing import Any

import numpy as np

from engine.kernels import Kernels


def interpreted_kernels() -> Kernels:
    """Those of CUDA, for tensors on the CPU."""
    interpret()
    from engine.cuda.kernels import triton_kernels

    return triton_kernels()


def interpret() -> None:
    """Nobody may have imported triton before, or the environment says the same already."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    if patch_tensor.__module__ == __name__:
        return

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = _wide(a) @ _wide(b) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = create_dot


def _wide(handle: Any) -> Any:
    """float64."""
    data = handle.data
    if data.dtype == np.uint16:  # bfloat16
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)
