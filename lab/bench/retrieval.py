"""The retrieval cases of `megamem bench kernels`: the selections beside the products that make their scores.

Legend: T tokens, H heads, N keys per side, d key dim, R Tucker rank, M rows (and columns) kept by the first stage,
K retrieved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.select import Kernels, implementation_of
from kernels.tucker_topk.op import gather_keys
from megamem.layers.key_products import key_products

SCORES = "key scores"


@dataclass(frozen=True)
class Retrieval:
    """Retrieval of one model: by product keys, a query per head (rank 0), or by Tucker cores, a query per rank."""

    model: str
    keys: int
    key_dim: int
    heads: int
    row_top_k: int
    top_k: int
    rank: int

    @property
    def selection(self) -> str:
        """The op that selects."""
        return "tucker_topk" if self.rank else "product_topk"

    def score_flops(self, tokens: int) -> int:
        """FLOPs of the products of queries and keys: 2 T N d for every query, on both sides."""
        return 4 * tokens * self.heads * max(1, self.rank) * self.keys * self.key_dim


# By the shapes of `megamem bench kernels`: the models of the papers (configs/) that read such tables.
RETRIEVALS: Mapping[str, tuple[Retrieval, ...]] = {
    "227m": (
        Retrieval("ultramemv2/227m_1.2b", keys=804, key_dim=192, heads=1, row_top_k=32, top_k=32, rank=2),
        Retrieval("memory_plus/227m_1.2b", keys=1138, key_dim=384, heads=2, row_top_k=80, top_k=80, rank=0),
    ),
    "1b": (
        Retrieval("ultramemv2/1b_7b", keys=1561, key_dim=512, heads=1, row_top_k=128, top_k=128, rank=2),
        Retrieval("memory_plus/1b_7b", keys=1656, key_dim=1024, heads=2, row_top_k=128, top_k=256, rank=0),
    ),
    "shard": (
        Retrieval("ultramemv2/2.5b_120b_top256", keys=4781, key_dim=640, heads=1, row_top_k=128, top_k=256, rank=2),
    ),
}


def contenders(
    case: Retrieval, dtype: torch.dtype, tokens: int, kernels: Kernels, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Operations to time: the products alone, with a selection, every selection alone; and the rows behind its entries.

    Queries and keys are of `dtype`; as in the layers, their products are widened to fp32 but for Tucker cores on a GPU. Beside the kernels' selection stand PyTorch's, and
    what `torch.topk` does without a defined order.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    # As the layers' key_scores: a product per side and Tucker rank, [2R, T, d] x [2R, d, H N]; or per head and side,
    # [2H, T, d] x [2H, d, N].
    num_products, width = (2 * case.rank, case.heads * case.keys) if case.rank else (2 * case.heads, case.keys)
    queries, keys = normal(num_products, tokens, case.key_dim), normal(num_products, case.key_dim, width)
    core = torch.rand(case.heads, case.rank, case.rank, generator=generator, device=device)
    direction = torch.ones(case.heads, case.rank, device=device)
    arguments = (*((core, direction, direction) if case.rank else ()), case.row_top_k, case.top_k)
    select: Callable[..., Any] = getattr(kernels, case.selection)
    in_torch: Callable[..., Any] = implementation_of(case.selection, "torch")
    unordered = _unordered_tucker if case.rank else _unordered_product

    def products() -> Tensor:
        return key_products(queries, keys)

    def scores() -> Tensor:
        wide = products() if case.rank and device.type == "cuda" else products().float()
        if case.rank:
            return wide.view(2, case.rank, tokens, case.heads, case.keys).permute(0, 2, 3, 4, 1)
        return wide.view(case.heads, 2, tokens, case.keys).permute(1, 2, 0, 3)

    rows, columns = scores().unbind(0)
    name, implementation = case.selection, kernels.implementations[case.selection]
    found: dict[str, Callable[[], Any]] = {
        SCORES: products,
        f"{SCORES}, then {name}, {implementation}": lambda: select(*scores().unbind(0), *arguments),
        f"{name}, {implementation}": lambda: select(rows, columns, *arguments),
    }
    if implementation != "torch":
        found[f"{name}, torch"] = lambda: in_torch(rows, columns, *arguments)
    found["torch.topk, equal scores in any order"] = lambda: unordered(rows, columns, *arguments)
    if case.rank:
        entries = torch.randint(case.keys**2, (tokens, case.heads * case.top_k), generator=generator, device=device)
        # Four virtual blocks.
        where = (case.keys, (1, 2, 3, 4), max(1, case.keys**2 // 4), 0, case.keys**2)
        rows_of = kernels.shuffled_rows
        rows_in_torch: Callable[..., Any] = implementation_of("shuffled_rows", "torch")
        found[f"shuffled_rows, {kernels.implementations['shuffled_rows']}"] = lambda: rows_of(entries, *where)
        found["shuffled_rows, torch"] = lambda: rows_in_torch(entries, *where)
    return found


def lines(case: Retrieval, dtype_name: str, tokens: int, seconds: Mapping[str, float]) -> list[str]:
    """Lines on one case: times, and their ratio to that of the products."""
    grid = f"{case.top_k} of {case.row_top_k} x {case.row_top_k}"
    found = [
        f"\n{case.model}: {case.selection}, {dtype_name} products, {tokens} tokens x {case.heads} heads x "
        f"{case.keys} keys per side, {grid}"
    ]
    for name, best in seconds.items():
        rate = f" {case.score_flops(tokens) / best / 1e12:8.3f} TFLOP/s" if name == SCORES else ""
        found.append(f"  {name:50} {best * 1e3:10.3f} ms {best / seconds[SCORES]:8.2f}x{rate}")
    return found


def _unordered_product(rows: Tensor, columns: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Product keys by `torch.topk` as it is, which leaves the order of equal scores undefined."""
    best_rows, best_columns = rows.topk(row_top_k), columns.topk(row_top_k)
    grid = best_rows.values.unsqueeze(3) + best_columns.values.unsqueeze(2)
    best = grid.flatten(2).topk(top_k).indices
    return best_rows.indices.gather(2, best // row_top_k), best_columns.indices.gather(2, best % row_top_k)


def _unordered_tucker(
    rows: Tensor, columns: Tensor, core: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Tucker scores by `torch.topk` as it is."""
    # On a GPU products come as they are, in bf16.
    rows, columns = rows.float(), columns.float()
    row_ids = torch.einsum("thnr,hr->thn", rows, u).topk(row_top_k).indices
    column_ids = torch.einsum("thnr,hr->thn", columns, v).topk(row_top_k).indices
    grid = torch.einsum("thir,hrs,thjs->thij", gather_keys(rows, row_ids), core, gather_keys(columns, column_ids))
    best = grid.flatten(2).topk(top_k).indices
    return row_ids.gather(2, best // row_top_k), column_ids.gather(2, best % row_top_k)
