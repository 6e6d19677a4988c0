"""The ops of a forward pass as one `Ops` object, which `kernels.torch`, `kernels.triton` and `kernels.cpu` make."""

from kernels.ops import Ops

__all__ = ["Ops"]
