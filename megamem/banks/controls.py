"""Controls: memory layers that read other rows than they ask for.

A memory that learns as much without its addresses has stored nothing behind them (`MemoryConfig.control`). What a layer
computes stays the same, and so does every cost; its bank alone is asked for other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamem.config.memory import Control


@dataclass(frozen=True)
class ControlledLookup:
    """A bank (`megamem.banks.bank.TableLookup`) behind a control.

    Attributes:
        bank: bank whose rows are read.
        control: choice of the rows; never `none`.
    """

    bank: Any
    control: Control

    def read(
        self,
        rows: Tensor,
        scores: Tensor,
        pre_input: Tensor | None,
        bins: Tensor | None = None,
        *rest: Any,
        **names: Any,
    ) -> Tensor:
        """See `TableLookup.read`."""
        bins = bins if bins is None or self.control == "one_row" else others(bins)
        values: Tensor = self.bank.read(self._controlled(rows), scores, pre_input, bins, *rest, **names)
        return values

    def read_heads(self, rows: Tensor, *rest: Any) -> Tensor:
        """See `TableLookup.read_heads`."""
        values: Tensor = self.bank.read_heads(self._controlled(rows), *rest)
        return values

    def _controlled(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows) if self.control == "one_row" else others(rows)


def others(of_tokens: Tensor) -> Tensor:
    """For every token what belongs to the one before it in [s, b], flattened: the same place of the sequence before, or,
    of the first sequence, the place before in the last one. So nobody reads what a later token of its own sequence asks
    for, wherever there are two sequences.

    Args:
        of_tokens: [T, ...], T = s b.
    """
    return of_tokens.roll(1, 0)
