"""Two checkpoints side by side, tensor by tensor, whatever their formats and layouts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import TensorReader, pieces


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two checkpoints in one tensor.

    Attributes:
        name: name of the tensor.
        text: the difference in words.
    """

    name: str
    text: str


@dataclass
class _Values:
    """Differences so far between two tensors of one shape."""

    num_elements: int = 0
    largest: float = 0.0
    num_nonfinite: int = 0


def differences(
    first: TensorReader,
    second: TensorReader,
    names: Iterable[str],
    *,
    tolerance: float = 0.0,
    labels: tuple[str, str] = ("the first", "the second"),
    compare_dtypes: bool = True,
    num_workers: int = 1,
    max_piece_bytes: int = 2**24,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[TensorDifference]:
    """Compare tensors of these names.

    Args:
        names: names of both, or of one of them.
        tolerance: largest distance of two elements, relative to the larger magnitude of the two; 0: the same bits, but
            for the sign of zero. NaN equals NaN.
        labels: the two checkpoints in words.
        compare_dtypes: another dtype is a difference.
        on_bytes: told of progress, in bytes of the first's tensors.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    with ThreadPoolExecutor(num_workers) as pool:
        tasks = [
            (
                name,
                pool.submit(
                    _compare, first, second, name, tolerance, labels, compare_dtypes, max_piece_bytes, on_bytes
                ),
            )
            for name in names
        ]
        return [TensorDifference(name, text) for name, task in tasks if (text := task.result()) is not None]


def _compare(
    first: TensorReader,
    second: TensorReader,
    name: str,
    tolerance: float,
    labels: tuple[str, str],
    compare_dtypes: bool,
    max_piece_bytes: int,
    on_bytes: Callable[[int], None],
) -> str | None:
    missing = [label for label, reader in zip(labels, (first, second), strict=True) if name not in reader.tensors]
    if missing:
        return f"is not in {missing[0]}"
    a, b = first.tensors[name], second.tensors[name]
    if a.shape != b.shape:
        return f"has the shape {a.shape} in {labels[0]}, and {b.shape} in {labels[1]}"
    found = _Values()
    for region in pieces(a.whole(name), max(1, max_piece_bytes // a.dtype.itemsize)):
        _compare_piece(first.read(region), second.read(region), tolerance, found)
        on_bytes(region.numel * a.dtype.itemsize)
    texts = []
    if compare_dtypes and a.dtype != b.dtype:
        texts.append(f"is {_short(a.dtype)} in {labels[0]}, and {_short(b.dtype)} in {labels[1]}")
    if found.num_elements:
        total = a.whole(name).numel
        apart = f", at most by {found.largest:.3g}" if found.largest else ""
        odd = f", {found.num_nonfinite} of them not finite on one side" if found.num_nonfinite else ""
        texts.append(f"differs in {found.num_elements:,} of {total:,} elements{apart}{odd}")
    return "; ".join(texts) or None


def _compare_piece(a: Tensor, b: Tensor, tolerance: float, found: _Values) -> None:
    common = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(common), b.to(common)
    if torch.equal(a, b):
        return
    same = a == b
    if common.is_floating_point:
        same |= a.isnan() & b.isnan()
        finite = a.isfinite() & b.isfinite()
        distance = (a.double() - b.double()).abs().nan_to_num(0.0, 0.0, 0.0)
        if tolerance:
            scale = torch.maximum(a.double().abs(), b.double().abs()).nan_to_num(0.0, 0.0, 0.0)
            same |= finite & (distance <= tolerance * scale)
        found.num_nonfinite += int((~same & ~finite).sum())
        if not bool(same.all()):
            found.largest = max(found.largest, float(distance[~same].max()))
    found.num_elements += int((~same).sum())


def nonfinite_tensors(
    reader: TensorReader, names: Sequence[str], max_piece_bytes: int, on_bytes: Callable[[int], None]
) -> Iterator[TensorDifference]:
    """Tensors that hold NaN or infinity, and how many."""
    for name in names:
        info = reader.tensors[name]
        number = 0
        for region in pieces(info.whole(name), max(1, max_piece_bytes // info.dtype.itemsize)):
            tensor = reader.read(region)
            on_bytes(tensor.nbytes)
            if tensor.dtype.is_floating_point:
                number += tensor.numel() - int(tensor.isfinite().sum())
        if number:
            yield TensorDifference(name, f"holds {number:,} elements that are not finite")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Counter:
    """Pass on numbers from several threads, one at a time."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._lock, self._tell = threading.Lock(), tell

    def __call__(self, number: int) -> None:
        with self._lock:
            self._tell(number)
