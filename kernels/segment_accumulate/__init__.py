"""See README.md beside this file."""

from kernels.segment_accumulate.op import segment_accumulate

__all__ = ["segment_accumulate"]
