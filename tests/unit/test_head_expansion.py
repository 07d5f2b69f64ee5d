"""Theorems of MIDUS on values that heads share, held by what the layer reads (Theorem 1, Propositions 2 and 3).

Legend: h heads, T tokens, N^2 rows of a table, d width of a head, V columns of the shared table. A_h [T, N^2] are the
weights with which head h reads, Y_h [T, d] is what it should say; a loss is 1/2 sum_h |Y_h - output_h|^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamem.banks.bank import Bank
from megamem.chunk.inputs import Inputs
from megamem.families.midus.config import MidusConfig
from tests.golden import build_memory, megatron

HEADS, TOKENS, KEYS, WIDTH = 3, 40, 4, 4


@dataclass
class Problem:
    """Queries and targets, and the keys that say how they are read.

    Attributes:
        queries: [T, h, d].
        keys: [h, 2, N, d / 2].
        wanted: [h, T, d].
    """

    queries: Tensor
    keys: Tensor
    wanted: Tensor

    def layer(self, columns: int) -> tuple[Any, Bank]:
        """The product's layer, with these keys and tables that are not set."""
        memory = MidusConfig(num_heads=HEADS, num_keys=KEYS, top_k=3, value_dim=columns)
        (layer,), (bank,) = build_memory(memory, megatron({"d": HEADS * WIDTH, "H": HEADS}, torch.float64))
        with torch.no_grad():
            layer.keys.copy_(self.keys)
        return layer, bank

    @torch.no_grad()
    def loss(self, table: Tensor, expansions: Tensor) -> float:
        """Loss of the layer's output with a table [N^2, V] and expansions [h, V, d]."""
        layer, bank = self.layer(table.shape[1])
        bank.get_parameter("values").copy_(table)
        layer.expansion.copy_(expansions)
        said = layer(self.queries.unsqueeze(1), Inputs(None)).squeeze(1).transpose(0, 1)
        return float((self.wanted - said).square().sum() / 2)

    @torch.no_grad()
    def weights(self) -> Tensor:
        """A [h, T, N^2]."""
        found = self.layer(1)[0].retrieve(self.queries)
        read = torch.zeros(TOKENS, HEADS, KEYS**2, dtype=torch.float64)
        return read.scatter_(2, found.entries, found.scores.squeeze(3)).transpose(0, 1)

    def best_by_head(self) -> Tensor:
        """A table for each head, [h, N^2, d]."""
        return torch.linalg.pinv(self.weights()) @ self.wanted

    def loss_by_head(self) -> float:
        """The least loss that there is with these queries and keys: as a table of h d columns, a slice per head."""
        table = torch.cat(self.best_by_head().unbind(0), 1)
        own = torch.eye(HEADS * WIDTH, dtype=torch.float64).unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
        return self.loss(table, own)

    def loss_shared(self) -> float:
        """Loss of the best table that all heads read as it is: (sum A^T A)^+ sum A^T Y (Proposition 2)."""
        read = self.weights()
        table = torch.linalg.pinv((read.mT @ read).sum(0)) @ (read.mT @ self.wanted).sum(0)
        return self.loss(table, torch.eye(WIDTH, dtype=torch.float64).expand(HEADS, -1, -1))


def problem(seed: int, *, alike: bool = False) -> Problem:
    """A random one; with `alike` all heads read the same."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries, keys = drawn(TOKENS, HEADS, WIDTH), drawn(HEADS, 2, KEYS, WIDTH // 2)
    if alike:
        queries, keys = queries[:, :1].expand_as(queries), keys[:1].expand_as(keys)
    return Problem(queries, keys, drawn(HEADS, TOKENS, WIDTH))


def factored(tables: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The closest shared table [N^2, V] and expansions [h, V, d], by the SVD of tables [h, N^2, d] side by side."""
    u, s, vt = torch.linalg.svd(torch.cat(tables.unbind(0), 1), full_matrices=False)
    return u[:, :columns], torch.stack((s[:columns, None] * vt[:columns]).split(WIDTH, 1))


def test_heads_that_read_alike_and_want_different_things_need_expansions() -> None:
    """Theorem 1: expansions lose nothing where the best tables factor; one table as it is loses 1/2 sum_h |P_A (Y_h -
    mean Y)|^2, P_A the projection onto what can be read."""
    for seed in range(3):
        case = problem(seed, alike=True)
        read = case.weights()[0]
        # Targets whose best tables have V = d columns in common.
        generator = torch.Generator().manual_seed(seed)
        common = torch.randn(KEYS**2, WIDTH, generator=generator, dtype=torch.float64)
        expansions = torch.randn(HEADS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        projection = read @ torch.linalg.pinv(read)
        case.wanted = read @ common @ expansions + (case.wanted - projection @ case.wanted)
        least, shared = case.loss_by_head(), case.loss_shared()
        gap = float((projection @ (case.wanted - case.wanted.mean(0))).square().sum() / 2)
        assert gap > 1
        assert abs(case.loss(common, expansions) - least) <= 1e-12 * shared
        assert abs(shared - least - gap) <= 1e-12 * shared


def test_the_loss_of_few_columns_is_bounded_by_the_singular_values_left_out() -> None:
    """Proposition 3, for heads that read differently: at most 1/2 max_h |A_h|^2 times the sum of their squares."""
    for seed in range(3):
        case = problem(seed)
        tables, least = case.best_by_head(), case.loss_by_head()
        values = torch.linalg.svdvals(torch.cat(tables.unbind(0), 1))
        largest = float(torch.linalg.matrix_norm(case.weights(), 2).max())
        excesses = []
        for columns in range(1, len(values) + 1):
            excess = case.loss(*factored(tables, columns)) - least
            bound = largest**2 / 2 * float(values[columns:].square().sum())
            assert -1e-9 * least <= excess <= bound + 1e-9 * least
            excesses.append(excess)
        assert excesses[0] > 0.01 * least
        assert abs(excesses[-1]) <= 1e-9 * least
