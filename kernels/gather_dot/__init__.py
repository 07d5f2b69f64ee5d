"""See README.md beside this file."""

from kernels.gather_dot.op import gather_dot

__all__ = ["gather_dot"]
