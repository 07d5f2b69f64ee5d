"""Dense gradients of tables under Megatron's DDP (`table.main_grad`), and lookups that wait to be added to them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.common.gradient_stream import GradientStream
from kernels.common.joined_lookups import Lookup, can_join, joined
from kernels.common.rounding import Rounding


class Roundings(Protocol):
    """Roundings of a bf16 gradient, one after the other (`table.roundings`)."""

    def next(self) -> Rounding:
        """Rounding of the next lookup that is added."""
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


def wait_for_last_lookup(table: Tensor) -> None:
    """Have a table's lookups wait for the last of a backward pass (`table.waiting_lookups`).

    Autograd adds them up before it hands the table's gradient on, when it has been through all of them. In blocks that are
    computed again, each block has a pass of its own.
    """
    waiting = WaitingLookups(table)
    table.waiting_lookups = waiting  # type: ignore[attr-defined]
    table.register_hook(lambda _: waiting.add_up())


class WaitingLookups:
    """Lookups that wait to be added to the gradient of their table as one."""

    def __init__(self, table: Tensor) -> None:
        # The table holds this.
        self._table = weakref.ref(table)
        self._lookups: list[Lookup] = []

    def append(self, lookup: Lookup) -> None:
        """Let a lookup wait. Lookups before it are added up now if they cannot be one with it."""
        table = self._table()
        assert table is not None
        if not can_join(self._lookups, lookup, table.shape[1]):
            self.add_up()
        self._lookups.append(lookup)

    def add_up(self) -> None:
        """Add all that wait to the table's gradient."""
        table = self._table()
        assert table is not None
        waiting, self._lookups = self._lookups, []
        if waiting:
            add_to_main_grad(table, joined(waiting))
