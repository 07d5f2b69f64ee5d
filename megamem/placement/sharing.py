"""Assignment of tables, and of the rows in them, to layers (UltraMemV2, Table 7).

A *bank* is the tables that a set of layers shares. Its family says how many rows it has, and which of them a layer
sees. Where a grid of keys addresses them, N is the number of keys per side of a layer's own table, g the group size, L
the number of layers with a memory. A "layer" is a memory layer here, counted from 0 over the blocks that have one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import PositiveInt

from megamem.config.base import Config, EffectiveWhen


@dataclass(frozen=True)
class SharingConfig(Config):
    """Assignment of tables to layers (UltraMemV2, Table 7)."""

    pattern: Literal["none", "block", "ring", "no_ring", "all"] = "none"
    """none: a private table per layer; block: `group` consecutive layers share one; ring, no_ring: every layer sees a
    window of `group` tables; all: one table of N^2 rows for all layers (Memory+)."""
    group: Annotated[
        PositiveInt,
        EffectiveWhen(lambda c: c.pattern not in ("none", "all"), "sharing.pattern is block, ring or no_ring"),
    ] = 1
    """Layers per block, or tables per window (the paper's g)."""
    window: Annotated[
        Literal["paper", "released"],
        EffectiveWhen(lambda c: c.pattern in ("ring", "no_ring"), "sharing.pattern is ring or no_ring"),
    ] = "paper"
    """Start of layer l's window: paper: (group - 1) // 2 tables before l (S4 is l-1..l+2); released: at l."""

    def check(self, num_memory_layers: int) -> None:
        """Refuse groups that the layers of a model do not make up.

        Raises:
            ValueError: the layers do not make up the groups; the message has key and value.
        """
        if self.pattern != "none" and self.group > num_memory_layers:
            raise ValueError(
                f"model.memory.sharing.group is {self.group}, more than the {num_memory_layers} memory layers that "
                "num_layers and placement give"
            )
        if self.pattern == "block" and num_memory_layers % self.group:
            raise ValueError(
                f"model.memory.sharing.group is {self.group}, which does not divide the {num_memory_layers} memory "
                "layers that num_layers and placement give"
            )


@dataclass(frozen=True)
class BankSpec:
    """One bank: `num_rows` rows, read by the memory layers `layers`.

    With `on_every_stage` every pipeline stage holds a copy of it, and the copies' gradients are added up. All layers read the
    same rows of such a bank, those of the tokens, or choose among these (`MemoryConfig.chooses_among_rows`).
    """

    index: int
    num_rows: int
    layers: tuple[int, ...]
    on_every_stage: bool = False


@dataclass(frozen=True)
class LayerView:
    """The window of a bank that one layer sees: rows first_row .. first_row + num_rows - 1, modulo `num_bank_rows`.

    `banks_before` are those of another family in the same model, which are counted first.
    """

    bank: int
    first_row: int
    num_rows: int
    num_bank_rows: int
    banks_before: int = 0

    @property
    def bank_of_family(self) -> int:
        """Number of the bank among those of its family."""
        return self.bank - self.banks_before

    @property
    def num_keys(self) -> int:
        """Keys per side of a square grid that addresses the window."""
        return math.isqrt(self.num_rows)


@dataclass(frozen=True)
class SharingPlan:
    """Every bank of a model and, per layer, what it sees of which."""

    banks: tuple[BankSpec, ...]
    views: tuple[LayerView, ...]

    def banks_of(self, layers: range) -> tuple[BankSpec, ...]:
        """The banks that the memory layers of one model chunk read.

        Raises:
            ValueError: a bank is also read by a layer outside of the chunk, because it would have to live on two
                pipeline stages.
        """
        wanted = tuple(bank for bank in self.banks if set(bank.layers) & set(layers))
        for bank in wanted:
            outside = sorted(set(bank.layers) - set(layers))
            if outside and not bank.on_every_stage:
                raise ValueError(
                    f"memory layers {bank.layers[0]}..{bank.layers[-1]} share memory bank {bank.index}, but only "
                    f"{layers.start}..{layers.stop - 1} are on one pipeline chunk: choose parallel.pipeline and "
                    "parallel.virtual_pipeline so that a chunk's memory layers are a multiple of "
                    "model.memory.sharing.group (block sharing), or one chunk (any other)"
                )
        return wanted


def private_banks(num_rows: int, num_layers: int) -> SharingPlan:
    """A bank of `num_rows` rows for each layer."""
    return SharingPlan(
        tuple(BankSpec(layer, num_rows, (layer,)) for layer in range(num_layers)),
        tuple(LayerView(layer, 0, num_rows, num_rows) for layer in range(num_layers)),
    )


def common_bank(num_rows: int, num_layers: int, *, on_every_stage: bool = False) -> SharingPlan:
    """One bank of `num_rows` rows, all of which every layer sees."""
    return SharingPlan(
        (BankSpec(0, num_rows, tuple(range(num_layers)), on_every_stage),),
        (LayerView(0, 0, num_rows, num_rows),) * num_layers,
    )


def plan_grids(sharing: SharingConfig, num_keys: int, num_layers: int) -> SharingPlan:
    """Banks and views of `num_layers` memory layers that retrieve from grids of `num_keys` keys per side.

    A window of g tables of N^2 rows holds g N^2 rows, of which a square grid of floor(N sqrt(g))^2 is addressed. Only
    with `all` does the number of rows not grow with the layers.
    """
    own_rows, group = num_keys**2, sharing.group
    grid = math.isqrt(own_rows * group) ** 2
    match sharing.pattern:
        case "none":
            return private_banks(own_rows, num_layers)
        case "all":
            return common_bank(own_rows, num_layers)
        case "block":
            num_rows = group * own_rows
            banks = tuple(
                BankSpec(block, num_rows, tuple(range(block * group, (block + 1) * group)))
                for block in range(num_layers // group)
            )
            views = tuple(LayerView(layer // group, 0, grid, num_rows) for layer in range(num_layers))
        case "ring" | "no_ring":
            num_rows = num_layers * own_rows
            banks = (BankSpec(0, num_rows, tuple(range(num_layers))),)
            starts = (_window_start(sharing, layer, num_layers) for layer in range(num_layers))
            views = tuple(LayerView(0, start * own_rows, grid, num_rows) for start in starts)
    return SharingPlan(banks, views)


def _window_start(sharing: SharingConfig, layer: int, num_layers: int) -> int:
    """First table of a layer's window: centred in the paper (S4 is l-1 .. l+2), at l in the release."""
    start = layer - (sharing.group - 1) // 2 if sharing.window == "paper" else layer
    if sharing.pattern == "no_ring":
        return max(0, min(start, num_layers - sharing.group))
    return start % num_layers
