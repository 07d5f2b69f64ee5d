"""Products of bf16 on cores that cannot multiply it, taken in fp32.

PyTorch multiplies bf16 there number by number, 6 to 25 times slower than fp32 (lab/docs/log.md). `products_in_fp32()`
puts wider kernels in the place of its own for CPUs: operands are converted, multiplied, and the result is rounded once,
which is what cores with bf16 give up to the order of a sum. The kernels lie below autograd, so that forward, backward,
Megatron's layers and ours all reach them, while weights, tables and what is kept for backward stay in bf16. They are
undone on exit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library, get_kernel

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", _ATTENTION, f"{_ATTENTION}_backward")
"""Operators of ATen whose kernels are replaced: `F.linear`, `@`, `einsum` and attention come down to them."""


@contextmanager
def products_in_fp32() -> Iterator[None]:
    """Multiply bf16 tensors of the CPU in fp32 until the context ends. For the whole process."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # That a kernel is replaced, which is what is meant.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name in PRODUCTS:
                library.impl(name, _wider(name), "CPU", with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


def _wider(name: str) -> Callable[..., Any]:
    """A kernel that hands fp32 to PyTorch's own, where it is given bf16."""
    kernel = get_kernel(f"aten::{name}", "CPU")

    def multiply(keys: Any, *operands: Any, **options: Any) -> Any:
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        # Operands of several dtypes are for PyTorch to refuse. Backward of attention has fp32 normalisers at the end.
        if any(tensor.dtype is not torch.bfloat16 for tensor in tensors[:2]) or not _agree(name, tensors):
            return kernel.call_boxed(keys, *operands, **options)
        wide = map(_widened, operands)
        result = kernel.call_boxed(keys, *wide, **{key: _widened(value) for key, value in options.items()})
        if isinstance(result, torch.Tensor):
            return result.bfloat16()
        # The second result of attention is the logarithm of its normaliser, which is fp32 in any case.
        return (result[0].bfloat16(), result[1]) if name == _ATTENTION else tuple(each.bfloat16() for each in result)

    return multiply


def _agree(name: str, tensors: Sequence[torch.Tensor]) -> bool:
    return name.startswith(_ATTENTION) or len({tensor.dtype for tensor in tensors}) == 1


def _widened(operand: Any) -> Any:
    return operand.float() if isinstance(operand, torch.Tensor) and operand.dtype is torch.bfloat16 else operand
