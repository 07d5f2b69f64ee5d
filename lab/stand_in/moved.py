"""Bytes that a GPU's operations read and write, by the line of ours that asks for them.

An operation moves each tensor that its schema names once, whole, and one in place twice. A gather moves a sector for each
element that it takes, if that is less, and an accumulation by index sorts its indices first. Products of matrices, whose
operations take longer than their bytes, and reads and sums of tables are left out: `pretrain.planning.seconds` has both by
formulas of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common.device_bytes import SECTOR_BYTES, SORTED_IN_PLACE, radix_sort_bytes
from lab.stand_in.accesses import accesses
from lab.stand_in.lines import BACKWARD, Lines
from pretrain.planning.dryrun.gpu import is_on_device
from pretrain.planning.dryrun.lines import CallSite
from pretrain.planning.dryrun.operations import ROOM

_aten = torch.ops.aten


class MovedBytes(TorchDispatchMode):
    """Counter of bytes by line: of a forward pass, and of the backward pass of what it asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: Counter[str] = Counter()
        self._lines = Lines()

    @contextmanager
    def counting(self) -> Iterator[MovedBytes]:
        """Count until the block ends."""
        with self:
            yield self

    def by_line(self) -> Mapping[str, int]:
        """Bytes by line, the largest first."""
        return dict(self._bytes.most_common())

    def launch(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        """Count a launch of a Triton kernel."""
        if (formula := _KERNELS.get(kernel)) is not None:
            self._add(self._lines.line(), formula(arguments))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if func.namespace in ("aten", "megamem_dryrun") and packet not in _PRODUCTS | ROOM:
            line = self._lines.line()
            reads, writes = accesses(func, args, kwargs, out)
            if packet in _IN_PLACE:
                reads = [*reads, *writes]
            if any(map(is_on_device, (*reads, *writes))):
                self._add(line, _OPERATIONS.get(packet, _whole)(reads, writes))
        return out

    def _add(self, line: CallSite, num_bytes: int) -> None:
        # In the backward pass of PyTorch's own operations the innermost line is that of the step.
        by_engine = line.through.startswith(BACKWARD) and line.line.startswith("pretrain/")
        self._bytes[line.through.removeprefix(BACKWARD) if by_engine else line.line] += num_bytes


def _whole(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    return sum(map(_bytes, (*reads, *writes)))


def _bytes(tensor: Tensor) -> int:
    # Of expanded tensors every element once: then it is in the cache.
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def _gathered(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    source, ids = reads
    (taken,) = writes
    return min(_bytes(source), SECTOR_BYTES * taken.numel()) + _bytes(ids) + taken.nbytes


def _accumulated(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    """Sums by index (aten/src/ATen/native/cuda/Indexing.cu): linear indices and places are written, sorted, and read
    with the values; each adds to an element of the target."""
    *indices, values = reads
    (target,) = writes
    num_passes = -(-(target.numel() * indices[0].numel() // max(1, values.numel())).bit_length() // _RADIX_BITS)
    per_index = (
        sum(map(_bytes, indices)) // indices[0].numel()
        + 2 * _INDEX
        + radix_sort_bytes(_INDEX, _INDEX, num_passes)
        + 2 * _INDEX
    )
    return indices[0].numel() * per_index + values.nbytes + 2 * values.numel() * target.element_size()


def _sorted(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    """Rows that a block holds are read and written once; longer ones pass by as often as a key has bytes."""
    (keys,) = reads
    if keys.dim() > 1 and keys.shape[-1] <= SORTED_IN_PLACE:
        return _whole(reads, writes)
    return keys.numel() * (_INDEX + radix_sort_bytes(keys.element_size(), _INDEX, keys.element_size()))


def _collected(*others: str) -> Callable[[Mapping[str, Any]], int]:
    """Bytes of a kernel that scores candidates: the scores of the keys that are kept, and all else whole."""

    def moved(arguments: Mapping[str, Any]) -> int:
        scores = arguments["row_scores"].nbytes + arguments["column_scores"].nbytes
        kept = SECTOR_BYTES * arguments["stage_ids"].numel() * arguments.get("RANK", 1)
        return min(kept, scores) + sum(arguments[name].nbytes for name in others)

    return moved


def _all(*names: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda arguments: sum(arguments[name].nbytes for name in names)


def _updated(arguments: Mapping[str, Any]) -> int:
    """Weights of the rows of a gradient, twice, and all that is read beside them."""
    gradient, factors = arguments["gradient"], arguments["factors"]
    numbers = 2 * _INDEX * factors.numel() if arguments["OF_ROWS"] else 0
    weights: int = 2 * arguments["weights"].element_size() * gradient.numel()
    return weights + gradient.nbytes + factors.nbytes + numbers


def _turned(arguments: Mapping[str, Any]) -> int:
    """Heads, which are parts of a product, before and after, and the cosines and sines of half of the columns."""
    names = ("query", "key", "turned_query", "turned_key", "scales", "query_gain", "key_gain")
    return (
        sum(_bytes(each) for name in names if (each := arguments[name]) is not None) + _bytes(arguments["turns"]) // 2
    )


def _turned_back(arguments: Mapping[str, Any]) -> int:
    """Their gradients before and after, and the heads themselves where they were normalised."""
    names = ["of_query", "of_key", "query_gradient", "key_gradient"]
    if arguments["NORM"]:
        names += ["query", "key", "scales", "query_gain", "key_gain", "gain_gradients"]
    return sum(_bytes(arguments[name]) for name in names) + _bytes(arguments["turns"]) // 2


_INDEX, _RADIX_BITS = 8, 8
_IN_PLACE = {
    getattr(_aten, f"{name}_")
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "pow",
        "clamp",
        "addcmul",
        "addcdiv",
        "lerp",
    )
}
"""Operations that read what they write, of which their schemas say the latter alone."""
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm}
_OPERATIONS: dict[Any, Callable[[Sequence[Tensor], Sequence[Tensor]], int]] = {
    _aten.gather: _gathered,
    _aten.index_put_: _accumulated,
    _aten.sort: _sorted,
}
_KERNELS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "collect_lists_kernel": _all("row_scores", "column_scores", "scratch"),
    "sort_lists_kernel": _all("scratch", "ids"),
    "collect_grid_kernel": _collected("stage_ids", "scratch"),
    "collect_sums_kernel": _collected("stage_ids", "scratch"),
    "sort_candidates_kernel": _all("scratch", "stage_ids", "retrieved"),
    "swiglu_kernel": _all("gate_and_up", "out"),
    "swiglu_gradient_kernel": _all("gate_and_up", "gradient", "out"),
    "tucker_scores_kernel": lambda of: _all("cores", "entries", "out", "kept")(of) + SECTOR_BYTES * of["kept"].numel(),
    "tucker_entry_gradients_kernel": _all("kept", "cores", "gradient", "of_entries", "of_cores"),
    "sum_of_equal_keys_kernel": lambda of: (
        _all("of_entries", "entries")(of) + SECTOR_BYTES * of["R"] * of["entries"].numel()
    ),
    "row_squares_kernel": _all("gradient", "squares"),
    "row_update_kernel": _updated,
    "softmax_sums_kernel": _all("logits", "places", "top", "total", "of_target"),
    # In place.
    "softmax_gradient_kernel": _all("logits", "logits", "places", "top", "total", "scale"),
    "rms_norm_kernel": _all("x", "gain", "out", "scales"),
    "rms_norm_gradients_kernel": _all("grad", "x", "gain", "scales", "gradient", "gain_gradients"),
    "rotated_heads_kernel": _turned,
    "rotated_heads_gradients_kernel": _turned_back,
}
"""Formulas of all kernels but those of lookups, which are in `pretrain.planning.seconds.row_seconds`."""
