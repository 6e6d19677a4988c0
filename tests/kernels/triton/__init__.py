"""The Triton kernels: in the interpreter, compiled ahead of time, and on a GPU where there is one."""
