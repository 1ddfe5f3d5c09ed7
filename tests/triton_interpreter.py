"""Triton's interpreter in the place of its compiler: kernels run on the CPU, program by program."""

import os
from typing import Any

from engine.kernels import Kernels


def interpreted_kernels() -> Kernels:
    """Those of CUDA, for tensors on the CPU. Nobody may have imported `engine.cuda.kernels` before `interpret`."""
    interpret()
    from engine.cuda.kernels import triton_kernels

    return triton_kernels()


def interpret() -> None:
    """Kernels that are imported from now on are interpreted.

    Triton 3.6 makes a number of an array of one element in a way that NumPy has given up in 2.4: repaired here.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    if patch_tensor.__module__ == __name__:
        return

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
