"""See README.md beside this file."""

from kernels.gather_sum.op import gather_sum

__all__ = ["gather_sum"]
