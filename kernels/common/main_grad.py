"""Dense gradients of tables under Megatron's DDP (`table.main_grad`), and lookups that wait to be added to them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.common.device_bytes import MOST_JOINED_ENTRIES
from kernels.common.gradient_stream import GradientStream
from kernels.common.joined_lookups import Lookup, joined
from kernels.common.rounding import Rounding


class Roundings(Protocol):
    """Roundings of a bf16 gradient, one after the other (`table.roundings`)."""

    def next(self) -> Rounding:
        """Those of the next lookup that is added."""
        ...


def add_to_main_grad(table: Tensor, lookup: Lookup) -> None:
    """Add a lookup to `table.main_grad`: on its stream if it has one, and with its next rounding if it is in bf16."""
    main_grad: Tensor = table.main_grad  # type: ignore[attr-defined]
    if main_grad.dtype == torch.bfloat16:
        roundings: Roundings = table.roundings  # type: ignore[attr-defined]
        lookup = replace(lookup, accumulate=partial(lookup.accumulate, rounding=roundings.next()))
    stream: GradientStream | None = getattr(table, "gradient_stream", None)
    if stream is None:
        lookup.add_to(main_grad)
    else:
        stream.add(lookup, main_grad)


class WaitingLookups:
    """Lookups of a table in a backward pass, which wait for the last of them (`table.waiting_lookups`).

    Autograd calls `add_up` before it hands the table's gradient on, when it has been through all lookups of a pass. In
    blocks that are computed again, each block has a pass of its own.
    """

    def __init__(self, table: Tensor) -> None:
        # The table holds this.
        self._table = weakref.ref(table)
        self._lookups: list[Lookup] = []
        self._num_entries = 0

    def append(self, lookup: Lookup) -> None:
        """Let a lookup wait. If it and those before it are too many, those are added up now."""
        if self._num_entries + lookup.ids.numel() > MOST_JOINED_ENTRIES:
            self.add_up()
        self._lookups.append(lookup)
        self._num_entries += lookup.ids.numel()

    def add_up(self, *_: object) -> None:
        """Add all that wait to the table's gradient."""
        table = self._table()
        assert table is not None
        waiting, self._lookups, self._num_entries = self._lookups, [], 0
        for lookup in joined(waiting):
            add_to_main_grad(table, lookup)
