"""What the engine does differently on CUDA: Triton kernels, and decode steps captured in graphs.

`programs.py` is Triton's language, compiled at first use; the other modules are plain Python around it.
"""
