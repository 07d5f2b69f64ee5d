"""Forms of token tables: factors against recorded tensors, codes against loops, fetched rows against resident ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.select import select_kernels
from megamem.banks.bank import Bank
from megamem.families.lave.config import LaveConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.token_tables.codec import FactoredRows, PlainRows, QuantisedRows, make_codec, right_singular_vectors
from megamem.token_tables.config import TokenTableConfig
from megamem.token_tables.fetched import FetchedRows
from megamem.token_tables.form import parse_form
from megamem.token_tables.rows import rows_of_addresses

CPU = torch.device("cpu")
Blocks = Callable[[], Iterator[tuple[int, Tensor]]]


def in_blocks(table: Tensor, size: int) -> Blocks:
    return lambda: ((first, table[first : first + size]) for first in range(0, len(table), size))


def restored(text: str, table: Tensor, num_slots: int, block: int = 5) -> Tensor:
    """A table, encoded in blocks, and decoded in another order."""
    form, blocks = parse_form(text), in_blocks(table, block)
    codec = make_codec(form, blocks, width=table.shape[1], num_slots=num_slots, dtype=table.dtype)
    records = torch.cat([codec.encode(first, rows) for first, rows in blocks()])
    assert records.shape == (len(table), codec.record_bytes)
    counted = form.num_bytes(
        num_rows=len(table), num_slots=num_slots, width=table.shape[1], element_bytes=table.element_size()
    )
    assert records.numel() + codec.shared_bytes == counted
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(3))
    rows = torch.empty_like(table)
    rows[order] = codec.decode(order, records[order])
    return rows


def test_ranks_are_those_of_the_paper() -> None:
    assert [parse_form(f"cut:{percent}").rank_of(2048) for percent in (10, 30, 40, 60)] == [1844, 1434, 1229, 820]
    # 0.7 * 10 is above 7 in floating point, and its ceiling would be 8.
    assert parse_form("cut:30%").rank_of(10) == 7
    assert parse_form("cut:12.5").cut == Fraction(1, 8)


def test_sizes_are_those_of_the_paper() -> None:
    table = {"num_rows": 128_256 * 8, "num_slots": 8, "width": 2048, "element_bytes": 2}
    scales = 4 * 128_256 * 8
    assert parse_form("full").num_bytes(**table) == 4_202_692_608
    assert parse_form("int8").num_bytes(**table) - scales == 2_101_346_304
    assert parse_form("int4").num_bytes(**table) - scales == 1_050_673_152
    ratio = parse_form("cut:30").num_bytes(**table) / parse_form("full").num_bytes(**table)
    assert ratio == pytest.approx(0.7113760759730539, rel=1e-15)
    # The largest rank that saves.
    assert parse_form("rank:2015").num_bytes(**table) <= 4_202_692_608 < parse_form("rank:2016").num_bytes(**table)


@pytest.mark.parametrize("text", ["int2", "rank", "rank:-1", "cut:100", "cut:", "FULL", ""])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="there is no form"):
        parse_form(text)


def test_a_rank_that_rows_do_not_have_is_refused() -> None:
    for text in ("rank:0", "rank:9"):
        with pytest.raises(ValueError, match="rows have 8 columns: ask for 1 to 8"):
            parse_form(text).rank_of(8)


def test_factors_are_the_recorded_decompositions(golden_dir: Path) -> None:
    recorded = load_file(golden_dir / "token" / "tide_svd.safetensors")
    rows = json.loads((golden_dir / "token" / "tide_svd.json").read_text(encoding="utf-8"))["rows"]
    table = recorded["in.table"]
    normal = table * torch.rsqrt(table.square().mean(1, keepdim=True) + 1e-5)
    for row in rows:
        percent = round(100 * row["reduction"])
        assert parse_form(f"cut:{percent}").rank_of(table.shape[1]) == row["rank"]
        found = restored(f"cut:{percent}", table, num_slots=1)
        wanted = recorded[f"recon_r{row['rank']}"]
        assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
        assert float((found - table).norm()) == pytest.approx(row["frobenius_err"], abs=1e-12)
        # Rows are normalised when they are read: after they are restored.
        normalised = found * torch.rsqrt(found.square().mean(1, keepdim=True) + 1e-5)
        error = float((normalised - normal).norm() / normal.norm())
        assert error == pytest.approx(row["rel_err_norm_after_recon"], abs=1e-12)


def test_each_slot_has_factors_of_its_own() -> None:
    table = torch.randn(3 * 14, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = restored("rank:2", table, num_slots=3)
    for slot in range(3):
        u, s, v = torch.linalg.svd(table[slot::3], full_matrices=False)
        best = u[:, :2] * s[:2] @ v[:2]
        assert torch.allclose(found[slot::3], best, rtol=0, atol=1e-12)


def test_matrices_of_many_slots_are_summed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(5 * 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = right_singular_vectors(in_blocks(table, 7), 5, 4, 3)
    monkeypatch.setattr("megamem.token_tables.codec._MOST_GRAM_BYTES", 2 * 8 * 4 * 4)
    assert torch.equal(right_singular_vectors(in_blocks(table, 7), 5, 4, 3), together)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("text", "largest"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("width", [8, 7, 1])
def test_codes_are_those_of_a_loop(text: str, largest: int, width: int, dtype: torch.dtype) -> None:
    table = torch.randn(23, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)
    table[4] = 0
    table[5] *= 1e-6
    # Halves between two codes go to the even one; the largest element keeps its sign.
    table[6] = torch.tensor([largest, 0.5, 1.5, -2.5, -largest, 3.5, 0, 1][:width], dtype=dtype)
    wanted = torch.empty_like(table)
    for number, row in enumerate(table.double().tolist()):
        scale = float(np.float32(max(map(abs, row)) / largest))
        codes = [max(-largest, min(largest, round(x / scale))) if scale else 0 for x in row]
        product = [np.float32(code) * np.float32(scale) if dtype != torch.float64 else code * scale for code in codes]
        wanted[number] = torch.tensor(product, dtype=torch.float64).to(dtype)
    assert torch.equal(restored(text, table, num_slots=1), wanted)
    if width == 8:
        assert wanted[6].tolist() == [largest, 0, 2, -2, -largest, 4, 0, 1]


def test_rows_in_full_are_the_same_bits() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        table = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
        table[2, 1], table[3] = -0.0, float("inf")
        assert torch.equal(restored("full", table, num_slots=1).view(torch.uint8), table.view(torch.uint8))


def fetched_bank(memory: TokenTableConfig, values: Tensor, columns: tuple[int, int] = (0, 1)) -> tuple[Bank, Bank]:
    """A table as a parameter, and in records that rows are fetched from."""
    (spec, *_), kernels = memory.plan(1).banks, select_kernels("auto", device_type="cpu")
    resident = Bank(spec, memory, kernels, dtype=values.dtype, device=CPU, replica_rank=0)
    with torch.no_grad():
        resident.get_parameter("values").copy_(values)
    codec = PlainRows(memory.value_dim, values.dtype)
    rows = FetchedRows(
        codec.encode(0, values).numpy(),
        codec,
        rows_per_token=memory.slots_per_address,
        part=columns[0],
        num_parts=columns[1],
        device=CPU,
    )
    return resident, Bank(spec, memory, kernels, dtype=values.dtype, device=CPU, replica_rank=0, fetched=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "memory",
    [
        MoveConfig(vocab_size=40, value_dim=8, num_slots=3, num_gate_heads=2),
        LaveConfig(vocab_size=40, value_dim=8, num_gate_heads=2),
        TideConfig(vocab_size=40, value_dim=8, num_tables=4),
        StemConfig(vocab_size=40, value_dim=8),
        MomeConfig(vocab_size=40, value_dim=8, num_slots=3, num_heads=2),
    ],
    ids=lambda memory: memory.kind,
)
@torch.no_grad()
def test_fetched_rows_give_the_same_sums_to_the_bit(memory: TokenTableConfig, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(memory.num_rows, 8, generator=generator).to(dtype)
    resident, fetched = fetched_bank(memory, values)
    assert not list(fetched.parameters())
    assert not fetched.sharded_state_dict(prefix="banks.0.")
    num_slots, num_bins = memory.slots_per_address, memory.lookup.bins
    for number in range(6):
        ids = torch.randint(40, (3, 5), generator=generator)
        # Announced, announced as another's, and not at all.
        if number % 3 < 2:
            fetched.announce(ids if number % 3 == 0 else ids + 1 - 2 * (ids == 39).long())
        rows = rows_of_addresses(ids.unsqueeze(0), num_slots)
        scores = torch.randn(15, num_slots, memory.lookup.scores, generator=generator).to(dtype)
        bins = (torch.arange(num_slots) % num_bins).expand_as(rows).contiguous() if num_bins > 1 else None
        for _ in range(2):
            assert torch.equal(
                fetched.read(rows, scores, None, bins, num_bins), resident.read(rows, scores, None, bins, num_bins)
            )
    no_token = torch.empty(0, num_slots, dtype=torch.int64)
    no_score = torch.empty(0, num_slots, memory.lookup.scores, dtype=dtype)
    assert fetched.read(no_token, no_score, None, None if num_bins == 1 else no_token, num_bins).shape[0] == 0


class Counted:
    """Counts the rows that are decoded, and fails when it is told to."""

    def __init__(self, codec: PlainRows) -> None:
        self._codec, self.num_rows, self.fail = codec, 0, False
        self.record_bytes, self.width, self.dtype = codec.record_bytes, codec.width, codec.dtype

    def decode(self, row_ids: Tensor, records: Tensor) -> Tensor:
        if self.fail:
            raise OSError("the disk is gone")
        self.num_rows += len(row_ids)
        return self._codec.decode(row_ids, records)


def counted_rows(num_tokens: int, num_slots: int) -> tuple[Counted, FetchedRows, Tensor]:
    table = torch.randn(num_tokens * num_slots, 4, generator=torch.Generator().manual_seed(1))
    codec = Counted(PlainRows(4, torch.float32))
    records = PlainRows(4, torch.float32).encode(0, table).numpy()
    rows = FetchedRows(
        records,
        codec,  # type: ignore[arg-type]
        rows_per_token=num_slots,
        part=0,
        num_parts=1,
        device=CPU,
    )
    return codec, rows, table


def test_a_context_that_grows_fetches_the_new_token_alone() -> None:
    codec, rows, table = counted_rows(num_tokens=50, num_slots=3)
    context = [7, 3, 3, 9]
    for token, num_rows in ((None, 9), (11, 12), (7, 12), (12, 15)):
        context += [] if token is None else [token]
        rows.announce(torch.tensor([context]))
        wanted = rows_of_addresses(torch.tensor([context]), 3)
        held, places = rows.table(wanted)
        assert torch.equal(held[places], table[wanted])
        assert (codec.num_rows, len(held)) == (num_rows, 3 * len(set(context)))
    # Rows that left the context are not held any more.
    rows.announce(torch.tensor([5]))
    assert len(rows.table(rows_of_addresses(torch.tensor([[5]]), 3))[0]) == 3


def test_rows_that_nobody_announced_do_not_pile_up() -> None:
    _, rows, table = counted_rows(num_tokens=50, num_slots=1)
    for token in range(50):
        held, places = rows.table(torch.tensor([[token]]))
        assert torch.equal(held[places], table[None, None, token])
        assert len(held) == 1


def test_what_goes_wrong_ahead_is_told_to_the_reader() -> None:
    codec, rows, _ = counted_rows(num_tokens=5, num_slots=1)
    codec.fail = True
    rows.announce(torch.tensor([1]))
    with pytest.raises(OSError, match="the disk is gone"):
        rows.table(torch.tensor([[1]]))


def test_a_rank_holds_its_columns_of_rows_that_are_restored_whole() -> None:
    table = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    for codec in (QuantisedRows(8, torch.float32, 8), FactoredRows(torch.eye(8)[None], torch.float32)):
        records = codec.encode(0, table).numpy()
        whole = codec.decode(torch.arange(20), torch.from_numpy(records))
        for part in range(2):
            rows = FetchedRows(records, codec, rows_per_token=1, part=part, num_parts=2, device=CPU)
            held, places = rows.table(torch.arange(20)[:, None])
            assert torch.equal(held[places][:, 0], whole[:, 4 * part : 4 * part + 4])
