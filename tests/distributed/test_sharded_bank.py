"""A bank split by columns, or by rows and columns, reads, and learns, what a whole one does: values, every gradient, and
the bits of a repetition.

The oracle is `Bank` with the naive kernels on the tokens of all ranks together.

Legend: G ranks of the group, T tokens of a rank, J rows read per token, C scores per row, V value dim, P pre-value dim,
B bins.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.select import select_kernels
from megamem.banks.bank import Bank, Columns
from megamem.config.memory import MemoryConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.initialisation.distributions import Normal
from megamem.initialisation.random_fill import fill
from megamem.placement.sharing import BankSpec
from parallel.exchange import Exchange, gather_ids
from parallel.layout import coefficients_per_rank
from parallel.sharded_bank import ShardedBank, announce_tokens

WORLD = 6


@dataclass(frozen=True)
class Case:
    """One lookup by all ranks of a group.

    Attributes:
        size: G.
        counts: T by rank.
        value_dim: V.
        pre_dim: P; 0 without pre-values.
        num_scores: C.
        num_rows: rows of the bank.
        rows_read: J.
        num_blocks: B.
        rows: random ones, the same one in all positions of a token, or one row for all tokens.
        exchanged: the lookup names the tables the other way round.
        row_parts: R.
    """

    size: int
    counts: tuple[int, ...]
    value_dim: int = 24
    pre_dim: int = 12
    num_scores: int = 2
    num_rows: int = 300
    rows_read: int = 5
    num_blocks: int = 1
    activation: Literal["none", "gelu"] = "none"
    rows: Literal["random", "repeated", "one"] = "random"
    kernels: Literal["auto", "naive"] = "auto"
    dtype: torch.dtype = torch.float64
    exchanged: bool = False
    row_parts: int = 1

    @property
    def memory(self) -> MemoryConfig:
        return UltraMemV2Config(
            value_dim=self.value_dim,
            pre_value_dim=self.pre_dim,
            num_cores=self.num_scores,
            pre_value_activation=self.activation,
        )

    @property
    def spec(self) -> BankSpec:
        return BankSpec(0, self.num_rows, (0,))


EVEN = {size: (7,) * size for size in (2, 3, 6)}
CASES = {
    "two ranks": Case(2, EVEN[2]),
    "tables that the layer names": Case(2, EVEN[2], pre_dim=24, exchanged=True),
    "three ranks, whose second one straddles both cores": Case(3, EVEN[3]),
    "three ranks, pieces of three columns": Case(3, EVEN[3], value_dim=18),
    "two ranks, three cores": Case(2, EVEN[2], num_scores=3),
    "two ranks, four cores": Case(2, EVEN[2], num_scores=4),
    "six ranks, four columns each": Case(6, EVEN[6]),
    "six ranks, one column of pre-values each": Case(6, EVEN[6], pre_dim=6, value_dim=6),
    "no pre-values": Case(3, EVEN[3], pre_dim=0),
    "no pre-values, one core": Case(2, EVEN[2], pre_dim=0, num_scores=1),
    "activation": Case(3, EVEN[3], activation="gelu"),
    "blocks": Case(3, EVEN[3], num_blocks=4),
    "blocks without pre-values": Case(2, EVEN[2], num_blocks=9, pre_dim=0),
    "a bank of more than 2^16 rows": Case(2, EVEN[2], num_rows=70_001),
    "a row in every position": Case(3, EVEN[3], rows="repeated"),
    "all tokens on one row": Case(6, EVEN[6], rows="one"),
    "more rows read than there are": Case(2, EVEN[2], num_rows=3, rows_read=11),
    "rows alone": Case(3, EVEN[3], row_parts=3, activation="gelu"),
    "rows alone, blocks, naive kernels": Case(2, EVEN[2], row_parts=2, kernels="naive", num_blocks=4),
    "rows and columns": Case(6, EVEN[6], row_parts=3, num_blocks=4),
    "rows and columns that straddle both cores": Case(6, EVEN[6], row_parts=2, activation="gelu"),
    "rows and columns without pre-values": Case(6, EVEN[6], row_parts=2, pre_dim=0, num_scores=3),
    "rows and columns, all tokens on one row": Case(6, EVEN[6], row_parts=3, rows="one"),
    "rows and columns, ranks with different tokens": Case(6, (1, 0, 9, 4, 0, 2), row_parts=2, num_blocks=2),
    "rows and columns, bf16": Case(6, EVEN[6], row_parts=2, dtype=torch.bfloat16),
    "columns that meet": Case(6, (6,) * 6, row_parts=3, num_blocks=4),
    "columns that meet and straddle both cores": Case(6, (6,) * 6, row_parts=2, activation="gelu"),
    "columns that meet, without pre-values": Case(6, (9,) * 6, row_parts=2, pre_dim=0, num_scores=4),
    "columns that meet, bf16": Case(6, (6,) * 6, row_parts=3, dtype=torch.bfloat16),
    "ranks with different tokens": Case(3, (1, 9, 4)),
    "ranks without tokens": Case(3, (0, 5, 0), num_blocks=4),
    "no rank has tokens": Case(2, (0, 0)),
    "naive kernels": Case(3, EVEN[3], kernels="naive", num_blocks=2),
    "fp32": Case(6, EVEN[6], dtype=torch.float32),
    "bf16": Case(3, EVEN[3], dtype=torch.bfloat16),
}
MEETING = [name for name in CASES if "meet" in name]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Inputs:
    """Inputs of one rank to a lookup, and the gradient that comes back."""

    rows: Tensor
    scores: Tensor
    pre_input: Tensor | None
    block: Tensor | None
    grad_out: Tensor


def inputs_of(case: Case, rank: int) -> Inputs:
    g = torch.Generator().manual_seed(100 + rank)
    count, read = case.counts[rank], case.rows_read

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(case.dtype)

    rows = torch.randint(case.num_rows, (count, read), generator=g)
    if case.rows == "repeated":
        rows = rows[:, :1].expand(-1, read).contiguous()
    elif case.rows == "one":
        rows = torch.full_like(rows, case.num_rows - 1)
    return Inputs(
        rows,
        normal(count, read, case.num_scores),
        normal(count, case.pre_dim) if case.pre_dim else None,
        torch.randint(case.num_blocks, (count, read), generator=g) if case.num_blocks > 1 else None,
        normal(count, case.num_blocks * case.value_dim),
    )


def fill_bank(bank: Bank) -> None:
    for entry in bank.sharded_state_dict(prefix="banks.0.").values():
        fill(
            entry.data, Normal(1.0), seed=1, name=entry.key, global_shape=entry.global_shape, offset=entry.global_offset
        )


def lookup(bank: Bank, inputs: Inputs, case: Case) -> dict[str, Tensor]:
    """Output and every gradient; tables gather theirs in `main_grad` as under Megatron's DDP, on top of what is there."""
    given = {"scores": inputs.scores.clone().requires_grad_()}
    if inputs.pre_input is not None:
        given["pre_input"] = inputs.pre_input.clone().requires_grad_()
    for table in bank.parameters():
        table.grad = None
        wide = torch.float64 if table.dtype == torch.float64 else torch.float32
        table.main_grad = torch.ones(table.shape, dtype=wide)  # type: ignore[attr-defined]
    names = {"values": "pre_values", "pre_values": "values"} if case.exchanged else {}
    out = bank.read(inputs.rows, given["scores"], given.get("pre_input"), inputs.block, case.num_blocks, **names)
    out.backward(inputs.grad_out)
    found = {"out": out.detach(), **{name: x.grad for name, x in given.items() if x.grad is not None}}
    for name, table in bank.named_parameters():
        assert table.grad is not None
        if isinstance(bank, ShardedBank) and case.kernels == "auto":
            # Straight into `main_grad`; autograd sees an empty gradient.
            assert table.grad_added_to_main_grad  # type: ignore[attr-defined]
            assert table.grad.is_sparse
            assert not table.grad._nnz()
            found[name] = table.main_grad.clone()  # type: ignore[attr-defined]
        else:
            found[name] = table.main_grad + table.grad  # type: ignore[attr-defined]
    return found


def expected(case: Case) -> dict[str, Tensor]:
    """The whole bank on the tokens of all ranks, in fp64."""
    wide = replace(case, dtype=torch.float64)
    bank = Bank(wide.spec, wide.memory, select_kernels("naive"), dtype=torch.float64, device="cpu", replica_rank=0)
    fill_bank(bank)
    with torch.no_grad():
        for table in bank.parameters():
            table.copy_(table.to(case.dtype))
    ranks = [inputs_of(case, rank) for rank in range(case.size)]

    def together(of: Callable[[Inputs], Tensor | None]) -> Any:
        parts = [part for part in map(of, ranks) if part is not None]
        return (
            torch.cat(parts).to(parts[0].dtype if parts[0].dtype == torch.int64 else torch.float64) if parts else None
        )

    inputs = Inputs(
        together(lambda i: i.rows),
        together(lambda i: i.scores),
        together(lambda i: i.pre_input),
        together(lambda i: i.block),
        together(lambda i: i.grad_out),
    )
    return lookup(bank, inputs, case)


def on_rank(case: Case, group: dist.ProcessGroup) -> tuple[dict[str, Tensor], bool]:
    """This rank's share of the lookup, and whether doing it again gave the same bits."""
    bank = ShardedBank(
        case.spec,
        case.memory,
        select_kernels(case.kernels),
        dtype=case.dtype,
        device="cpu",
        replica_rank=0,
        group=group,
        row_parts=case.row_parts,
    )
    fill_bank(bank)
    announce_tokens([bank], case.counts if len(set(case.counts)) > 1 else None)
    inputs = inputs_of(case, group.rank())
    first, again = (lookup(bank, inputs, case) for _ in range(2))
    return first, all(torch.equal(first[name], again[name]) for name in first)


BANKS_OF_IDS = {(300, 1): torch.int32, (2**31, 1): torch.int32, (2**29, 4): torch.int32, (2**30, 4): torch.int64}
"""Sizes of banks with their numbers of bins, and the dtype of their ids."""


def ids_that_arrive(group: dist.ProcessGroup) -> list[bool]:
    """True if ids and bins of each bank come from all ranks as they were sent, in as many bits as they need."""
    counts = (1, 0, 3)

    def sent(rank: int, num_rows: int, num_bins: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(rank)
        of_rank = (torch.randint(end, (counts[rank], 7), generator=g) for end in (num_rows, num_bins))
        # The largest of all.
        rows, bins = (
            ids.index_fill_(1, torch.tensor(2), end - 1) for ids, end in zip(of_rank, (num_rows, num_bins), strict=True)
        )
        return rows, bins

    found = []
    for (num_rows, num_bins), dtype in BANKS_OF_IDS.items():
        rows, bins = (
            torch.cat(parts) for parts in zip(*(sent(rank, num_rows, num_bins) for rank in range(3)), strict=True)
        )
        own_rows, own_bins = sent(group.rank(), num_rows, num_bins)
        bins_too = num_bins > 1
        exchange = Exchange(group, counts)
        ids, of_bin = gather_ids(own_rows, own_bins if bins_too else None, num_rows, num_bins, exchange)
        right = ids.dtype == dtype and torch.equal(ids.long(), rows)
        found.append(right and (torch.equal(of_bin.long(), bins) if of_bin is not None else not bins_too))
    return found


@pytest.fixture(scope="module")
def outcomes(run_ranks: Any) -> dict[str, list[Any]]:
    def main() -> dict[str, Any]:
        groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 6)}
        rank = dist.get_rank()
        found: dict[str, Any] = {
            name: on_rank(case, groups[case.size]) for name, case in CASES.items() if rank < case.size
        }
        with patch("parallel.layout.MEETING_RANKS", 2):
            found |= {f"{name}, met": on_rank(CASES[name], groups[CASES[name].size]) for name in MEETING}
        return found | ({"ids": ids_that_arrive(groups[3])} if rank < 3 else {})

    by_rank = run_ranks(main, WORLD)
    return {name: [of_rank[name] for of_rank in by_rank if name in of_rank] for name in by_rank[0]}


@pytest.mark.parametrize("name", CASES)
def test_a_split_bank_is_a_whole_one(outcomes: dict[str, Any], name: str) -> None:
    case, reference = CASES[name], expected(CASES[name])
    ranks = [found for found, _ in outcomes[name]]
    assert set(ranks[0]) == set(reference) >= {"out", "scores", "values"}
    for part, whole in reference.items():
        shares = [found[part] for found in ranks]
        if part in ("values", "pre_values"):
            size = case.size // case.row_parts
            shares = [torch.cat(shares[first : first + size], 1) for first in range(0, case.size, size)]
        joined = torch.cat(shares)
        assert joined.shape == whole.shape
        error = (joined.double() - whole).abs().max() if whole.numel() else torch.zeros(())
        assert error <= TOLERANCE[case.dtype] * (whole.abs().max() if whole.numel() else 0), part


@pytest.mark.parametrize("name", CASES)
def test_a_lookup_repeats_to_the_bit(outcomes: dict[str, Any], name: str) -> None:
    assert all(repeats for _, repeats in outcomes[name])


@pytest.mark.parametrize("name", MEETING)
def test_columns_that_meet_first_make_the_same_sums(outcomes: dict[str, Any], name: str) -> None:
    """To the bit where two meet: a sum of three may be added up in another order."""
    case = CASES[name]
    for (apart, _), (met, repeats) in zip(outcomes[name], outcomes[f"{name}, met"], strict=True):
        assert repeats
        for part, found in met.items():
            of_two = case.size // case.row_parts == 2
            error = (found - apart[part]).abs().max()
            assert error <= (0 if of_two else TOLERANCE[case.dtype] * apart[part].abs().max()), part


def test_ids_and_bins_arrive_in_32_bits_where_these_do(outcomes: dict[str, Any]) -> None:
    assert outcomes["ids"] == [[True] * len(BANKS_OF_IDS)] * 3


def test_a_rank_gets_the_coefficients_of_its_own_columns_only() -> None:
    # Two cores: one coefficient per row inside of a core, two where the columns straddle both.
    assert [coefficients_per_rank(2, size) for size in (1, 2, 3, 4, 6, 8)] == [2, 1, 2, 1, 1, 1]
    assert [coefficients_per_rank(4, size) for size in (2, 8, 6)] == [2, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_part_of_a_bank_starts_with_the_bits_of_the_whole(size: int) -> None:
    case = Case(size, (1,) * size)
    whole = Bank(case.spec, case.memory, select_kernels("auto"), dtype=torch.float32, device="cpu", replica_rank=0)
    fill_bank(whole)
    width = math.lcm(8, 3)
    assert whole.values.shape[1] == width
    parts = []
    for part in range(size):
        if 12 % size:
            memory = replace(case.memory, pre_value_dim=0)
        else:
            memory = case.memory
        bank = Bank(
            case.spec,
            memory,
            select_kernels("auto"),
            dtype=torch.float32,
            device="cpu",
            replica_rank=part,
            columns=Columns(part, size),
        )
        fill_bank(bank)
        entry = bank.sharded_state_dict("banks.0.")["banks.0.values"]
        assert entry.global_shape == (300, width)
        assert entry.global_offset == (0, part * width // size)
        assert entry.local_shape == (300, width // size)
        assert entry.replica_id == (0, 0, part)
        assert entry.prepend_axis_num == 0
        parts.append(copy.deepcopy(bank.values.detach()))
    assert torch.equal(torch.cat(parts, 1), whole.values)
