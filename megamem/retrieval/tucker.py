"""Tucker-decomposed query-key retrieval, TDQKR (UltraMem; UltraMemV2, Eq. 6-7 and 16).

Legend: T tokens, H heads, N keys per side, R Tucker rank, C cores, M rows (and columns) kept by the first stage, K
retrieved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kept_scores import kept_scores
from kernels.tucker_topk.op import TuckerTopk, torch_tucker_topk
from megamem.retrieval.retrieved import Retrieved


def retrieve(
    row_scores: Tensor,
    column_scores: Tensor,
    cores: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    row_top_k: int,
    top_k: int,
    select: TuckerTopk = torch_tucker_topk,
) -> Retrieved:
    """Two-stage top-K on the Tucker-scored grid.

    Stage 1 ranks rows by <u, S_row> and columns by <v, S_col>, the rank-1 approximation of the summed core, and keeps M
    of each. Stage 2 scores the M x M candidates exactly, s_c(i, j) = S_row[i] C_c S_col[j], and keeps the K with the
    largest sum over cores. Gradients flow through the scores of the kept entries only.

    Args:
        row_scores: [T, H, N, R].
        column_scores: [T, H, N, R].
        cores: [C, H, R, R].
        u: [H, R], leading left singular vector of the summed core.
        v: [H, R], leading right one.
        row_top_k: M.
        top_k: K <= M^2.
        select: the selection, which also settles what comes first among equal scores.
    """
    num_keys = row_scores.shape[2]
    with torch.no_grad():
        stage_ids, entries = select(row_scores, column_scores, cores.sum(0), u, v, row_top_k, top_k)
        rows, columns = entries.unbind(0)
    scores = torch.einsum(
        "thkr,chrs,thks->thkc", kept_scores(row_scores, rows), cores, kept_scores(column_scores, columns)
    )

    def stage_scores() -> Tensor:
        sides = ((row_scores, u), (column_scores, v))
        return torch.stack([torch.einsum("thnr,hr->thn", side, direction) for side, direction in sides])

    return Retrieved(rows * num_keys + columns, scores, stage_ids, stage_scores)


def leading_singular_vectors(core_sum: Tensor, u_before: Tensor, v_before: Tensor) -> tuple[Tensor, Tensor]:
    """Leading singular vectors of the summed core, with the joint sign that stays closest to the vectors before.

    The SVD leaves the joint sign of (u, v) open, and the sign selects which quadrant of the grid is searched: it must
    not flip between steps. With no vectors before (all zero) the sign that makes sum(u) + sum(v) positive is taken, so
    that it depends on no library.

    Args:
        core_sum: [..., R, R], the cores summed over C; SVD runs in at least fp32.
        u_before: [..., R], the left vectors of the step before, or zeros.
        v_before: [..., R], the right ones.

    Returns:
        u and v, each [..., R], in the dtype of the vectors before.
    """
    wide = core_sum.to(torch.promote_types(core_sum.dtype, torch.float32))
    # Host sync on GPUs: the SVD looks at its convergence.
    left, _, right = torch.linalg.svd(wide)
    u, v = left[..., :, 0], right[..., 0, :]
    same = (u - u_before).abs().sum(-1) + (v - v_before).abs().sum(-1)
    flipped = (u + u_before).abs().sum(-1) + (v + v_before).abs().sum(-1)
    fresh = ((u_before == 0).all(-1) & (v_before == 0).all(-1)) & (u.sum(-1) + v.sum(-1) < 0)
    sign = torch.where((flipped < same) | fresh, -1.0, 1.0).to(wide.dtype).unsqueeze(-1)
    return (u * sign).to(u_before.dtype), (v * sign).to(v_before.dtype)
