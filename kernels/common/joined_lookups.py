"""Lookups of one table as one, for gradients that are added up once per table and not once per layer.

Layers that share a table read the same rows again and again. Added up together, their entries take one sort, and each row of
the gradient is read and written once. The order of additions is that of the lookups: entries of a row are added up as they
are lookup by lookup, to the bit where a kernel adds them one by one.

Legend: L lookups, T tokens of all of them, J rows read per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.common.device_bytes import ENTRIES_PER_JOINED_VECTOR, MOST_JOINED_ENTRIES
from kernels.common.kept_results import kept_on

Accumulate: TypeAlias = Callable[..., None]
"""A `kernels.common.tables.SegmentAccumulate`."""

_ATTRIBUTE = "_megamem_joined_ids"


@dataclass(frozen=True)
class Lookup:
    """Operands of `kernels.segment_accumulate.naive.segment_accumulate`, and an implementation of it."""

    accumulate: Accumulate
    ids: Tensor
    coef: Tensor
    vec: Tensor
    bins: Tensor | None

    def add_to(self, gradient: Tensor) -> None:
        """Add to a gradient, [rows, W]."""
        self.accumulate(gradient, self.ids, self.coef, self.vec, self.bins)

    @property
    def form(self) -> tuple[object, ...]:
        """Form of its operands, which lookups that are joined have in common."""
        operands = (self.ids, self.coef, self.vec, self.bins)
        return self.accumulate, *(None if x is None else (x.shape[1:], x.dtype) for x in operands)


def can_join(lookups: Sequence[Lookup], other: Lookup, width: int) -> bool:
    """Tell whether lookups that can be one, or none, and another can be one.

    Args:
        lookups: lookups that would come before.
        other: the last lookup.
        width: columns of the table.
    """
    if not lookups:
        return True
    num_vectors = other.vec.numel() // width
    return (
        other.form == lookups[0].form
        and sum(each.ids.numel() for each in (*lookups, other)) <= MOST_JOINED_ENTRIES
        # Vectors are copied to stand side by side.
        and other.ids.numel() >= ENTRIES_PER_JOINED_VECTOR * num_vectors
    )


def in_groups(lookups: Iterable[Lookup], width: int) -> Iterator[Lookup]:
    """Lookups in their order, those together that can be one."""
    group: list[Lookup] = []
    for lookup in lookups:
        if not can_join(group, lookup, width):
            yield joined(group)
            group = []
        group.append(lookup)
    if group:
        yield joined(group)


def joined(lookups: Sequence[Lookup]) -> Lookup:
    """Lookups that can be one (`can_join`) as one, in their order.

    Tables that are read by the same tensors of ids get one tensor for them, too, whose sort they share.
    """
    if len(lookups) == 1:
        return lookups[0]
    bins = [lookup.bins for lookup in lookups if lookup.bins is not None]
    return Lookup(
        lookups[0].accumulate,
        _joined_ids([lookup.ids for lookup in lookups]),
        torch.cat([lookup.coef for lookup in lookups]),
        torch.cat([lookup.vec for lookup in lookups]),
        torch.cat(bins) if bins else None,
    )


def _joined_ids(ids: Sequence[Tensor]) -> Tensor:
    """Ids of all lookups, [T, J], kept on the first one's: they live as long as a table's lookups that need them."""
    key = tuple((id(each), each._version) for each in ids)
    # Beside the others, whose numbers would be those of other tensors if they went.
    together, _ = kept_on(ids[0], _ATTRIBUTE, key, lambda: (torch.cat(list(ids)), ids[1:]))
    return together
