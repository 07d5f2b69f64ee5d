"""Lookups of one table as one, for gradients that are added up once per table and not once per layer.

Layers that share a table read the same rows again and again. Added up together, their entries take one sort, and each row of
the gradient is read and written once. The order of additions is that of the lookups: entries of a row are added up as they
are lookup by lookup, to the bit where a kernel adds them one by one.

Legend: L lookups, T tokens of all of them, J rows read per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

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

    def is_like(self, other: Lookup) -> bool:
        """Tell whether both can be parts of one lookup."""
        return self._form == other._form

    @property
    def _form(self) -> tuple[object, ...]:
        operands = (self.ids, self.coef, self.vec, self.bins)
        return self.accumulate, *(None if x is None else (x.shape[1:], x.dtype) for x in operands)


def joined(lookups: Sequence[Lookup]) -> Lookup:
    """Lookups that are like each other as one, in their order.

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
