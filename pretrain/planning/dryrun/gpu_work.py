"""Memory that a GPU's operations need besides their results, and the kernels of Triton ops.

Bodies of the Triton ops run as on a GPU, down to their launches: what they allocate on the way is seen, and so is what
is launched. PyTorch's own operations have their scratch by formula, from their sources at 2.11 to 2.13
(aten/src/ATen/native/cuda: SortStable.cu, Indexing.cu, Embedding.cu; transformers/cuda/flash_attn/flash_api.cpp).

Legend: n elements of a sorted row or indices, e bytes of a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common.device_bytes import SORTED_IN_PLACE
from kernels.common.ops import body_of
from pretrain.planning.dryrun.gpu import is_on_device

# Compiled kernels, and the interpreted ones of tests.
_LAUNCHERS = ("triton.runtime.jit.JITFunction.run", "triton.runtime.interpreter.InterpretedFunction.run")
_aten = torch.ops.aten
_INDEX = 8
_SUM = 4
_FULL_SORT_SEGMENTS = 128
_ROW_PER_GRID = 1_000_000
_EMBEDDED_WITHOUT_SORT = 3072
_ROWS_PER_THREAD = 10


class GpuWork(TorchDispatchMode):
    """Allocator of the scratch of each operation while it runs, and of what the kernels of Triton are launched on."""

    def __init__(self, on_launch: Callable[[str, Mapping[str, Any]], None]) -> None:
        """
        Args:
            on_launch: called at each launch of a Triton kernel, with its name and its arguments by name.
        """
        super().__init__()
        self._on_launch = on_launch

    @contextmanager
    def working(self) -> Iterator[GpuWork]:
        """Stand in for the GPU's work until the block ends."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False))
            self._on_launch(kernel.fn.__name__, {**named, **options})

        with ExitStack() as stack:
            # Without Triton there is no memory, and nothing to launch.
            for name in _LAUNCHERS if find_spec("triton") else ():
                stack.enter_context(patch(name, run))
            stack.enter_context(self)
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "megamem" and "triton" in func._schema.name:
            return body_of(func)(*args, **kwargs)
        formula = _SCRATCH.get(func.overloadpacket)
        if formula is None or not is_on_device(args[0]):
            return func(*args, **kwargs)
        scratch = args[0].new_empty(formula(*args, **kwargs), dtype=torch.uint8)
        out = func(*args, **kwargs)
        del scratch
        return out


def _radix_sort(n: int, key: int, value: int = _INDEX) -> int:
    """Scratch of CUB for pairs: the other half of its double buffers."""
    return n * (key + value)


def _sort(keys: Tensor, *args: Any, stable: bool = False, dim: int = -1, descending: bool = False) -> int:
    n = keys.shape[dim] if keys.dim() else 1
    if (n <= SORTED_IN_PLACE and keys.dim() != 1) or not keys.numel():
        return 0
    segments, e = keys.numel() // n, keys.element_size()
    if segments == 1 or n >= _ROW_PER_GRID:
        # The positions that come along.
        return n * _INDEX + _radix_sort(n, e)
    if segments < _FULL_SORT_SEGMENTS:
        # Pairs of segment and position, twice, and the keys of the first of two sorts.
        return keys.numel() * (2 * _INDEX + e) + _radix_sort(keys.numel(), e)
    return keys.numel() * _INDEX + _radix_sort(keys.numel(), e)


def _index_put(
    target: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False, *unsafe: Any
) -> int:
    """Linear indices, their positions, both sorted."""
    if not accumulate:
        return 0
    n = math.prod(torch.broadcast_shapes(*(index.shape for index in indices if index is not None)))
    return 4 * n * _INDEX + _radix_sort(n, _INDEX)


def _embedding_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> int:
    """Positions of indices, both sorted, and then sums of up to ten rows of one index in fp32 beside the sorted."""
    n = indices.numel()
    if n <= _EMBEDDED_WITHOUT_SORT:
        return 0
    sums = (n // _ROWS_PER_THREAD + min(n, num_weights)) * grad.shape[-1] * _SUM
    return 2 * n * _INDEX + max(n * _INDEX + _radix_sort(n, _INDEX), sums)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, *others: Any) -> int:
    """Scratch of FlashAttention, heads before tokens: see `_flash_backward`."""
    return _flash_backward(grad.transpose(1, 2), query.transpose(1, 2), key.transpose(1, 2))


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, *others: Any, **options: Any) -> int:
    """The query's gradient in fp32, a sum per row, and the gradients of keys and values before they are summed over the
    queries that share them; of queries [b, q, n, d] and keys [b, k, g, d].
    """
    b, q, n, d = query.shape
    rows = b * n * -(-q // 128) * 128
    multiple = 32 if d <= 128 else 64
    of_query = rows * (-(-d // multiple) * multiple + 1) * _SUM
    shared = key.shape[2] != n
    return of_query + shared * 2 * b * key.shape[1] * n * d * key.element_size()


_SCRATCH: dict[Any, Callable[..., int]] = {
    _aten.sort: _sort,
    _aten.index_put_: _index_put,
    _aten._index_put_impl_: _index_put,
    _aten.embedding_dense_backward: _embedding_backward,
    _aten._flash_attention_backward: _flash_backward,
    torch.ops.megamem_dryrun.attention_backward: _attention_backward,
}
