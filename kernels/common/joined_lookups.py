"""Lookups of one table as one, for gradients that are added up once per table and not once per layer.

Layers that share a table read the same rows again and again. Added up together, their entries take one sort, and each row of
the gradient is read and written once. The order of additions is that of the lookups: entries of a row are added up as they
are lookup by lookup, to the bit where a kernel adds them one by one.

Legend: L lookups, T tokens of all of them, J rows read per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.common.device_bytes import MOST_JOINED_ENTRIES

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

    def is_like(self, other: Lookup) -> bool:
        """Tell whether both can be parts of one lookup."""
        return self._form == other._form

    @property
    def _form(self) -> tuple[object, ...]:
        operands = (self.ids, self.coef, self.vec, self.bins)
        return self.accumulate, *(None if x is None else (x.shape[1:], x.dtype) for x in operands)


def joined(lookups: Sequence[Lookup]) -> Iterator[Lookup]:
    """The lookups in their order, as many of them in one as can be.

    Tables that are read by the same tensors of ids get one tensor for them, too, whose sort they share.
    """
    begin, num_entries = 0, 0
    for end, lookup in enumerate(lookups):
        entries = lookup.ids.numel()
        if end > begin and (num_entries + entries > MOST_JOINED_ENTRIES or not lookup.is_like(lookups[begin])):
            yield _as_one(lookups[begin:end])
            begin, num_entries = end, 0
        num_entries += entries
    if lookups:
        yield _as_one(lookups[begin:])


def _as_one(lookups: Sequence[Lookup]) -> Lookup:
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
    first, *others = ids
    versions = [each._version for each in ids]
    known: tuple[list[Tensor], list[int], Tensor] | None = getattr(first, _ATTRIBUTE, None)
    if known is not None and versions == known[1] and list(map(id, others)) == list(map(id, known[0])):
        return known[2]
    together = torch.cat([first, *others])
    setattr(first, _ATTRIBUTE, (others, versions, together))
    return together
