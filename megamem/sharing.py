"""Which layers read which rows of which tables (UltraMemV2, Table 7).

A *bank* is the pair of tables (values, pre-values) that a set of layers shares. N is the number of keys per side of a layer's own table,
g the group size, L the number of layers with a memory. "Layer" is a memory layer here, counted from 0 over the blocks that have one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megamem.config import MemoryConfig


@dataclass(frozen=True)
class BankSpec:
    """One bank: `num_rows` rows, read by the memory layers `layers`."""

    index: int
    num_rows: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class LayerView:
    """The window of a bank that one layer sees: rows first_row .. first_row + num_keys^2 - 1, modulo the bank's rows."""

    bank: int
    first_row: int
    num_keys: int

    @property
    def num_rows(self) -> int:
        """Rows in the window, the square of the keys per side."""
        return self.num_keys**2


@dataclass(frozen=True)
class SharingPlan:
    """Every bank of a model and, per layer, what it sees of which."""

    banks: tuple[BankSpec, ...]
    views: tuple[LayerView, ...]

    def banks_of(self, layers: range) -> tuple[BankSpec, ...]:
        """The banks that the memory layers of one model chunk read.

        Raises:
            ValueError: if a bank is also read by a layer outside of the chunk, because it would have to live on two pipeline stages.
        """
        wanted = tuple(bank for bank in self.banks if set(bank.layers) & set(layers))
        for bank in wanted:
            outside = sorted(set(bank.layers) - set(layers))
            if outside:
                raise ValueError(
                    f"memory layers {bank.layers[0]}..{bank.layers[-1]} share memory bank {bank.index}, but only {layers.start}..{layers.stop - 1} are on one "
                    "pipeline chunk: choose parallel.pipeline and parallel.virtual_pipeline so that a chunk's memory layers are a multiple of "
                    "model.memory.sharing.group (block sharing), or one chunk (any other)"
                )
        return wanted


def plan_sharing(memory: MemoryConfig, num_layers: int) -> SharingPlan:
    """Banks and views of the `num_layers` memory layers of a model.

    A window of g tables of N^2 rows holds g N^2 rows, of which a square grid of floor(N sqrt(g))^2 is addressed. Only with `all` does the
    number of rows not grow with the layers.
    """
    own_rows, group = memory.num_keys**2, memory.sharing.group
    num_keys = math.isqrt(own_rows * group)
    match memory.sharing.pattern:
        case "none":
            banks = tuple(BankSpec(layer, own_rows, (layer,)) for layer in range(num_layers))
            views = tuple(LayerView(layer, 0, memory.num_keys) for layer in range(num_layers))
        case "block":
            banks = tuple(
                BankSpec(block, group * own_rows, tuple(range(block * group, (block + 1) * group)))
                for block in range(num_layers // group)
            )
            views = tuple(LayerView(layer // group, 0, num_keys) for layer in range(num_layers))
        case "all":
            banks = (BankSpec(0, own_rows, tuple(range(num_layers))),)
            views = tuple(LayerView(0, 0, memory.num_keys) for _ in range(num_layers))
        case "ring" | "no_ring":
            banks = (BankSpec(0, num_layers * own_rows, tuple(range(num_layers))),)
            views = tuple(
                LayerView(0, _window_start(memory, layer, num_layers) * own_rows, num_keys)
                for layer in range(num_layers)
            )
    return SharingPlan(banks, views)


def _window_start(memory: MemoryConfig, layer: int, num_layers: int) -> int:
    """First table of a layer's window: the paper centres it (S4 is l-1 .. l+2), the release starts at the layer's own."""
    group = memory.sharing.group
    start = layer - (group - 1) // 2 if memory.sharing.window == "paper" else layer
    if memory.sharing.pattern == "no_ring":
        return max(0, min(start, num_layers - group))
    return start % num_layers
