"""`ngram_hashes`: its signature, and the function in PyTorch and in C++. Hashes have no gradient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op


class NgramHashes(Protocol):
    """See `kernels.ngram_hashes.naive.ngram_hashes`."""

    def __call__(
        self,
        extended: Tensor,
        positions: Tensor,
        multipliers: Tensor,
        moduli: Tensor,
        offsets: Tensor,
        orders: Tensor,
        missing_id: Tensor,
        boundary_id: Tensor,
        operation: str,
        cut_at_boundary: bool,
        missing_row: int | None,
    ) -> Tensor: ...


SCHEMA = (
    "(Tensor extended, Tensor positions, Tensor multipliers, Tensor moduli, Tensor offsets, Tensor orders,"
    " Tensor missing_id, Tensor boundary_id, str operation, bool cut_at_boundary, int? missing_row)"
    " -> Tensor"
)
"""Schema of a custom op of PyTorch for `NgramHashes`."""


def empty_result(extended: Tensor, positions: Tensor, multipliers: Tensor, moduli: Tensor, *rest: Any) -> Tensor:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    return extended.new_empty(moduli.numel(), *positions.shape)


def stretches_of(extended: Tensor, positions: Tensor, max_order: int) -> int:
    """Stretches of consecutive tokens, each behind so many ids less one."""
    return (len(extended) - len(positions)) // (max_order - 1)


def torch_ngram_hashes(
    extended: Tensor,
    positions: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    orders: Tensor,
    missing_id: Tensor,
    boundary_id: Tensor,
    operation: str,
    cut_at_boundary: bool,
    missing_row: int | None,
) -> Tensor:
    """The function of `kernels.ngram_hashes.naive.ngram_hashes`."""
    max_order = multipliers.shape[1]
    num_stretches = stretches_of(extended, positions, max_order)
    length = len(positions) // num_stretches
    stretches = extended.reshape(num_stretches, max_order - 1 + length, -1)
    ids_before = [stretches[:, max_order - 1 - lag :][:, :length].reshape(positions.shape) for lag in range(max_order)]
    hashed = ids_before[0] * multipliers[:, 0, None, None]
    add, seen = hashed.add_ if operation == "sum" else hashed.bitwise_xor_, None
    for lag, ids in enumerate(ids_before[1:], start=1):
        # What starts alone hide counts for nothing in n-grams that have a row of their own.
        if cut_at_boundary or missing_row is None:
            there = positions >= lag
            if cut_at_boundary:
                there &= ids != boundary_id
                seen = there if seen is None else there.logical_and_(seen)
            ids = torch.where(there, ids, missing_id)
        # All n-grams have two tokens.
        factors = multipliers[:, lag] if lag < 2 else multipliers[:, lag] * (lag < orders)
        add(ids * factors[:, None, None])
    found = hashed.unsqueeze(1) % moduli[..., None, None]
    if missing_row is not None:
        found = torch.where(positions < (orders - 1)[:, None, None, None], missing_row, found)
    return found.add_(offsets[..., None, None]).flatten(0, 1)


@custom_op("cpu_ngram_hashes", empty_result, schema=SCHEMA)
def cpu_ngram_hashes(
    extended: Tensor,
    positions: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    orders: Tensor,
    missing_id: Tensor,
    boundary_id: Tensor,
    operation: str,
    cut_at_boundary: bool,
    missing_row: int | None,
) -> Tensor:
    """The function of `kernels.ngram_hashes.naive.ngram_hashes` in C++."""
    out = empty_result(extended, positions, multipliers, moduli)
    tensors = *(each.contiguous() for each in (extended, multipliers, moduli, offsets, orders)), missing_id, boundary_id
    (num_groups, num_heads), max_order = moduli.shape, multipliers.shape[1]
    flags = int(operation == "xor"), int(cut_at_boundary), int(missing_row is not None)
    sizes = num_groups, num_heads, max_order, *positions.shape, stretches_of(extended, positions, max_order)
    cpp.call(
        "ngram_hashes", "ngram_hashes", *flags, missing_row or 0, *tensors, positions, *positions.stride(), *sizes, out
    )
    return out
