"""Dense gradients of tables under Megatron's DDP (`table.main_grad`)."""

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
    """Roundings of a bf16 gradient, one after the other."""

    def next(self) -> Rounding:
        """Rounding of the next lookup that is added."""
        ...


class MainGradient:
    """A table's `main_grad`, to which lookups are added.

    Attributes:
        stream: stream that adds them, for which whoever reads the gradient waits; None: the one that asks.
        roundings: stochastic roundings of a gradient in bf16.
    """

    def __init__(self, table: Tensor, stream: GradientStream | None = None) -> None:
        # The table holds this.
        self._table = weakref.ref(table)
        self.stream = stream
        self.roundings: Roundings | None = None
        self._waiting: list[Lookup] | None = None

    def wait_for_last_lookup(self) -> None:
        """Have lookups wait for the last of a backward pass, to be added up as one.

        Autograd adds them up before it hands the table's gradient on, when it has been through all of them. In blocks that are
        computed again, each block has a pass of its own.
        """
        self._waiting = []
        self._living.register_hook(lambda _: self.add_up())

    def add(self, lookup: Lookup) -> Tensor:
        """See `TableGradient.add`: an empty sparse tensor, which costs nothing, and DDP's hook still fires."""
        table = self._living
        if self._waiting is None:
            self._add(lookup)
        else:
            # Lookups before it are added up now if they cannot be one with it.
            if not can_join(self._waiting, lookup, table.shape[1]):
                self.add_up()
            self._waiting.append(lookup)
        table.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=table.device),
            table.new_empty(0, table.shape[1]),
            table.shape,
            check_invariants=False,
        )

    def add_up(self) -> None:
        """Add all lookups that wait."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._add(joined(waiting))

    def _add(self, lookup: Lookup) -> None:
        main_grad: Tensor = self._living.main_grad  # type: ignore[attr-defined]
        if main_grad.dtype == torch.bfloat16:
            assert self.roundings is not None
            lookup = replace(lookup, accumulate=partial(lookup.accumulate, rounding=self.roundings.next()))
        if self.stream is None:
            lookup.add_to(main_grad)
        else:
            self.stream.add(lookup, main_grad)

    @property
    def _living(self) -> Tensor:
        table = self._table()
        assert table is not None
        return table
