"""How fast the selections are: `python -m kernels.retrieval_speed [torch|triton|naive]`, or `selection_seconds` for benchmarks.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.retrieval import PRODUCT_TOPK, TUCKER_TOPK
from kernels.tucker_topk.naive import gather_keys


@dataclass(frozen=True)
class SelectionCase:
    """One retrieval; rank 0 stands for product keys."""

    name: str
    keys: int
    heads: int
    row_top_k: int
    top_k: int
    rank: int


CASES = (
    SelectionCase("quickstart", 64, 1, 16, 16, 2),
    SelectionCase("ultramemv2/227m_1.2b", 804, 1, 32, 32, 2),
    SelectionCase("ultramemv2/500m_6.8b", 964, 1, 94, 94, 2),
    SelectionCase("ultramemv2/1b_7b", 1561, 1, 128, 128, 2),
    SelectionCase("ultramemv2/2.5b_60b_top768", 3350, 1, 128, 768, 2),
    SelectionCase("memory_plus/227m_1.2b", 1138, 2, 80, 80, 0),
    SelectionCase("memory_plus/1b_7b", 1656, 2, 128, 256, 0),
)


def selection(case: SelectionCase, implementation: str, num_tokens: int, device: str) -> Callable[[], object]:
    """A call of the implementation on normal scores with the strides that the layers give them."""
    g = torch.Generator(device).manual_seed(0)
    scores = torch.randn(2, max(case.rank, 1), num_tokens, case.heads, case.keys, generator=g, device=device)
    rows, columns = scores.permute(0, 2, 3, 4, 1).unbind(0)
    sizes = (case.row_top_k, case.top_k)
    sizes = (case.row_top_k, case.top_k)
    if case.rank == 0:
        rows, columns = rows[..., 0], columns[..., 0]
        if implementation == "topk":
            return lambda: _unordered_product(rows, columns, *sizes)
        return lambda: PRODUCT_TOPK[implementation](rows, columns, *sizes)
    core = torch.rand(case.heads, case.rank, case.rank, generator=g, device=device)
    u = torch.ones(case.heads, case.rank, device=device) / case.rank**0.5
    if implementation == "topk":
        return lambda: _unordered_tucker(rows, columns, core, u, *sizes)
    return lambda: TUCKER_TOPK[implementation](rows, columns, core, u, u, *sizes)


# What a defined order is compared with: `torch.topk` as it is, whose order among equal scores is undefined.
def _unordered_product(rows: Tensor, columns: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    best_rows, best_columns = rows.topk(row_top_k), columns.topk(row_top_k)
    grid = best_rows.values.unsqueeze(3) + best_columns.values.unsqueeze(2)
    best = grid.flatten(2).topk(top_k).indices
    return best_rows.indices.gather(2, best // row_top_k), best_columns.indices.gather(2, best % row_top_k)


def _unordered_tucker(
    rows: Tensor, columns: Tensor, core: Tensor, u: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    row_ids = torch.einsum("thnr,hr->thn", rows, u).topk(row_top_k).indices
    column_ids = torch.einsum("thnr,hr->thn", columns, u).topk(row_top_k).indices
    grid = torch.einsum("thir,hrs,thjs->thij", gather_keys(rows, row_ids), core, gather_keys(columns, column_ids))
    best = grid.flatten(2).topk(top_k).indices
    return row_ids.gather(2, best // row_top_k), column_ids.gather(2, best % row_top_k)


def selection_seconds(calls: list[Callable[[], object]], rounds: int, device: str) -> list[list[float]]:
    """Times of the calls, taking turns, `rounds` of each after one that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, found in zip(calls, times, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            # Processor time on CPU: other processes do not count.
            clock = time.perf_counter if device == "cuda" else time.process_time
            start = clock()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                found.append(clock() - start)
    return times


def main() -> None:
    implementation = sys.argv[1] if len(sys.argv) > 1 else "torch"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_tokens = 4096 if device == "cuda" else 512
    if device == "cpu":
        torch.set_num_threads(1)
    print(f"{num_tokens} tokens on {device}, ms per call as median (lowest): torch.topk, {implementation}, ratio")
    for case in CASES:
        calls = [selection(case, name, num_tokens, device) for name in ("topk", implementation)]
        plain, ours = ([1e3 * value for value in found] for found in selection_seconds(calls, 15, device))
        shown = [f"{statistics.median(found):8.2f} ({min(found):.2f})" for found in (plain, ours)]
        print(f"  {case.name:28} {shown[0]} {shown[1]} {statistics.median(ours) / statistics.median(plain):6.2f}")


if __name__ == "__main__":
    main()
