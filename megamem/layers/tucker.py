"""Tucker-decomposed query-key retrieval (TDQKR), its calibration, and the memory layers with it.

UltraMem and UltraMemV2 (UltraMemV2, sections 2 and 3; Eq. 6-9, 12, 16).

Legend: T tokens of this rank, D hidden size, H heads, N keys per side, d key dim, R Tucker rank, C cores, M rows (and
columns) kept by the first stage, K retrieved, V value dim, W rows of the layer's window, e key expansion, B virtual
blocks with a value projection each (e^2 or 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.tucker_scores.op import TuckerScores, torch_tucker_scores
from kernels.tucker_topk.op import TuckerTopk, torch_tucker_topk
from megamem.banks.shuffle import KeyedShuffle, random_permutation
from megamem.config.model import ModelConfig
from megamem.config.width import Width
from megamem.initialisation.distributions import Normal
from megamem.initialisation.random_fill import fill
from megamem.layers.key_products import key_products
from megamem.layers.layer import ScoreCalibration
from megamem.layers.retrieval import RetrievalLayer, Retrieved
from megamem.retrieval.config import TuckerConfig
from megamem.retrieval.initial import memory_variance

# Tokens that retrieve in a calibration.
_SAMPLE_TOKENS = 128


def retrieve(
    key_scores: Tensor,
    cores: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    row_top_k: int,
    top_k: int,
    select: TuckerTopk = torch_tucker_topk,
    score: TuckerScores = torch_tucker_scores,
) -> Retrieved:
    """Two-stage top-K on the Tucker-scored grid.

    Stage 1 ranks rows by <u, S_row> and columns by <v, S_col>, the rank-1 approximation of the summed core, and keeps M
    of each. Stage 2 scores the M x M candidates exactly, s_c(i, j) = S_row[i] C_c S_col[j], and keeps the K with the
    largest sum over cores. Gradients flow through the scores of the kept entries only.

    Args:
        key_scores: [2, T, H, N, R], S_row and S_col.
        cores: [C, H, R, R].
        u: [H, R], leading left singular vector of the summed core.
        v: [H, R], leading right one.
        row_top_k: M.
        top_k: K <= M^2.
        select: the selection, which also settles what comes first among equal scores.
        score: the scores of what is kept.
    """
    num_keys = key_scores.shape[3]
    with torch.no_grad():
        stage_ids, kept = select(key_scores[0], key_scores[1], cores.sum(0), u, v, row_top_k, top_k)
        entries = torch.add(kept[1], kept[0], alpha=num_keys)
    scores = score(key_scores, cores, kept)
    return Retrieved(entries, scores, stage_ids, lambda: directed(key_scores, torch.stack((u, v))))


def directed(key_scores: Tensor, directions: Tensor) -> Tensor:
    """Scores by which stage 1 ranks keys, <u, S_row> and <v, S_col>: [2, T, H, N], differentiable in the scores alone.

    Args:
        key_scores: [2, T, H, N, R].
        directions: [2, H, R], u and v.
    """
    out: Tensor = _Directed.apply(key_scores, directions)
    return out


class _Directed(torch.autograd.Function):
    """A pass per Tucker rank each way; the gradient lies in memory as the scores do, [2, R, T, H, N]."""

    @staticmethod
    def forward(ctx: Any, key_scores: Tensor, directions: Tensor) -> Tensor:
        ctx.dtype = key_scores.dtype
        ctx.by_rank = directions.detach()[:, None, :, None].unbind(-1)
        first, *others = zip(key_scores.unbind(-1), ctx.by_rank, strict=True)
        out = torch.mul(*first)
        for of_keys, direction in others:
            out.addcmul_(of_keys, direction)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grads
        by_rank = torch.stack([(gradient * direction).to(ctx.dtype) for direction in ctx.by_rank], 1)
        return by_rank.movedim(1, -1), None


def _as_read(products: Tensor) -> Tensor:
    """Products as selections read them: on a GPU as they are, and widened in its kernels' registers; else in fp32."""
    return products if products.is_cuda else products.to(torch.promote_types(products.dtype, torch.float32))


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


class TuckerLayer(RetrievalLayer):
    """Tucker-decomposed retrieval (TDQKR), a shuffle, and a value projection.

    With key expansion e the grid has e sqrt(W) keys per side, e^2 virtual blocks of W entries, and all blocks read the
    same W rows (Eq. 8). Their values are summed over all blocks (`summed`), or per block, each with its own
    projection (`projected`, Eq. 9). As released, the block of an entry comes from the shuffle and not from the key set
    (Eq. 10-11), and all blocks share their cores.
    """

    memory: TuckerConfig
    cores: Tensor
    u: Tensor
    v: Tensor
    permutation: Tensor

    def _build(self, hidden_size: int, seed: int) -> None:
        memory, heads, rank, keys = self.memory, self.memory.num_heads, self.memory.tucker_rank, self.num_keys
        self.query_proj = self._matrix(memory.num_queries * memory.key_dim, hidden_size, Width.INPUTS)
        self.keys = self._weight(heads, 2, keys, memory.key_dim, rank)
        self.query_norm = self._weight(memory.key_dim)
        self.keys_norm = self._weight(memory.key_dim)
        self.cores = self._weight(memory.num_cores, heads, rank, rank)
        self.value_proj = self._matrix(hidden_size, memory.num_value_projections * memory.value_dim, Width.OUTPUTS)
        wide = torch.promote_types(self.config.params_dtype, torch.float32)
        vectors = torch.zeros(heads, rank, dtype=wide, device=self.cores.device)
        self.register_buffer("u", vectors)
        self.register_buffer("v", vectors.clone())
        self.shuffle = KeyedShuffle(keys, seed=seed, name=self.name) if memory.shuffle == "keyed" else None
        if memory.shuffle == "table":
            permutation = random_permutation(keys**2, seed=seed, name=self.name)
            self.register_buffer("permutation", permutation.to(self.cores.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TuckerLayer:
        """Keep the singular vectors in fp32 when the layer is cast: they select, with a sign kept over steps."""
        u, v = self.u, self.v
        super()._apply(fn, recurse)
        self.u, self.v = u.to(self.u.device), v.to(self.v.device)
        return self

    def retrieve(self, x: Tensor) -> Retrieved:
        """See `RetrievalLayer.retrieve`."""
        key_scores = self.key_scores(x)
        wide = torch.promote_types(key_scores.dtype, torch.float32)
        return retrieve(
            key_scores,
            self.cores.to(wide),
            self.u.to(wide),
            self.v.to(wide),
            row_top_k=self.memory.row_top_k,
            top_k=self.memory.top_k,
            select=self.kernels.tucker_topk,
            score=self.kernels.tucker_scores,
        )

    def key_scores(self, x: Tensor) -> Tensor:
        """Row and column scores, [2, T, H, N, R], of the tokens `x` [T, D]: RMS-normalised queries and keys, Eq. 6.

        The queries are shared by the heads, as in the release, unless each has its own.
        """
        memory = self.memory
        heads, rank, keys = memory.num_heads, memory.tucker_rank, self.num_keys
        queries = F.linear(x, self.query_proj).view(x.shape[0], memory.num_queries, memory.key_dim)
        queries = self.kernels.rms_norm(queries, self.query_norm, self.epsilon)
        if memory.query == "single":
            queries = queries.repeat_interleave(rank, dim=1)
        normal_keys = self.kernels.rms_norm(self.keys.transpose(3, 4), self.keys_norm, self.epsilon)
        if memory.query == "per_head":
            # One product per (side, head): [2H, T, d] x [2H, d, N R].
            by_side_and_head = normal_keys.transpose(0, 1).reshape(2 * heads, keys * rank, memory.key_dim)
            products = _as_read(key_products(queries.transpose(0, 1), by_side_and_head.transpose(1, 2)))
            return products.view(2, heads, x.shape[0], keys, rank).transpose(1, 2)
        # One product per (side, rank): [2R, T, d] x [2R, d, H N].
        by_side_and_rank = normal_keys.permute(1, 3, 4, 0, 2).reshape(2 * rank, memory.key_dim, heads * keys)
        products = _as_read(key_products(queries.transpose(0, 1), by_side_and_rank))
        return products.view(2, rank, x.shape[0], heads, keys).permute(0, 2, 3, 4, 1)

    def locate(self, entries: Tensor) -> tuple[Tensor, Tensor | None]:
        """Shuffled (Eq. 8), split into virtual block and row, moved to the window's start, wrapped around the bank."""
        view, with_blocks = self.view, self.memory.num_value_projections > 1
        if self.shuffle is not None:
            grid = (self.shuffle.num_keys, self.shuffle.round_keys)
            return self.kernels.shuffled_rows(
                entries, *grid, view.num_rows, view.first_row, view.num_bank_rows, with_blocks
            )
        if self.memory.shuffle == "table":
            entries = self.permutation[entries]
        rows = (entries % view.num_rows + view.first_row) % view.num_bank_rows
        return rows, entries // view.num_rows if with_blocks else None

    def project(self, values: Tensor, x: Tensor) -> Tensor:
        """Eq. 12, or Eq. 9 with the projections of all blocks side by side."""
        return F.linear(values, self.value_proj)

    def _measure_scores(self, seed: int) -> ScoreCalibration:
        return calibrate_scores(self.memory, self.num_keys, self.cores, seed=seed, name=self.name)

    @torch.no_grad()
    def calibrate(self, seed: int) -> ScoreCalibration | None:
        """The first singular vectors and, unless released, the gains at which the mean retrieved score is 1."""
        self.u.zero_()
        self.v.zero_()
        self.refresh([self])
        if self.memory.initialisation == "released":
            return None
        scores = self._measure_scores(seed)
        self.query_norm.fill_(scores.gain)
        self.keys_norm.fill_(scores.gain)
        return scores

    def predicted_std(
        self, model: ModelConfig, table_std: float, calibration: ScoreCalibration | None, seed: int
    ) -> float:
        """By Eq. 22 with the layer's own gains and projections, so that it covers the release's constants too."""
        scores = calibration or self._measure_scores(seed)
        # A score is a row times a column score, and each is a query times a key. Host sync: at initialisation.
        mean_score = float(self.query_norm.mean() * self.keys_norm.mean()) ** 2 / scores.gain**4
        # Host sync: at initialisation.
        value_proj_variance = float(self.value_proj.square().mean())
        return math.sqrt(
            memory_variance(
                model,
                self.memory,
                sigma_v=table_std,
                score_square=mean_score**2 * (1 + scores.sigma_s**2),
                pre_input_variance=self.pre_input_variance,
                value_proj_variance=value_proj_variance,
            )
        )

    @property
    def pre_input_variance(self) -> float:
        """Variance of what the pre-values are multiplied with, for inputs of mean square 1; 0 without pre-values."""
        return 0.0

    @classmethod
    @torch.no_grad()
    def refresh(cls, layers: Sequence[Self]) -> None:
        """The singular vectors of all layers from their cores, by one SVD."""
        cores, u, v = (
            torch.stack(tensors)
            for tensors in zip(*((layer.cores.sum(0), layer.u, layer.v) for layer in layers), strict=True)
        )
        for layer, new_u, new_v in zip(layers, *leading_singular_vectors(cores, u, v), strict=True):
            layer.u.copy_(new_u)
            layer.v.copy_(new_v)


@torch.no_grad()
def calibrate_scores(memory: TuckerConfig, num_keys: int, cores: Tensor, *, seed: int, name: str) -> ScoreCalibration:
    """Measure the scores that a layer will retrieve (UltraMemV2, section 6.2).

    The paper sets the gains of the query and key norms so that the mean retrieved score is 1, and feeds the scores'
    standard deviation sigma_s into Eq. 22. Both are measured by Monte Carlo on the layer's own cores, with random
    normalised queries and keys, through the real retrieval.

    Args:
        num_keys: N, the keys per side that the layer addresses.
        cores: [C, H, R, R], the layer's initial cores.
        name: the layer's global name; with the seed it keys the sample.

    Returns:
        Figures rounded to six digits, so that they do not depend on how a matrix product was split over threads.
    """
    rank, heads = memory.tucker_rank, memory.num_heads
    queries = _unit_mean_square(
        (_SAMPLE_TOKENS, memory.num_queries, memory.key_dim), seed, f"{name}.calibration.queries"
    )
    keys = _unit_mean_square((heads, 2, num_keys, rank, memory.key_dim), seed, f"{name}.calibration.keys")
    queries = queries.view(_SAMPLE_TOKENS, 2, *memory.query_shape, memory.key_dim).expand(-1, -1, heads, rank, -1)
    scores = torch.einsum("tshrd,hsnrd->sthnr", queries, keys)
    # Host sync: at initialisation.
    wide = cores.detach().cpu().double()
    zeros = torch.zeros(heads, rank, dtype=torch.float64)
    u, v = leading_singular_vectors(wide.sum(0), zeros, zeros)
    retrieved = retrieve(scores, wide, u, v, row_top_k=memory.row_top_k, top_k=memory.top_k).scores
    # Host sync: at initialisation.
    mean = float(retrieved.mean())
    if mean <= 0:
        raise ValueError(
            f"the mean retrieved score of {name} is {mean:.3g} at initialisation, which no norm gain turns into 1: "
            "raise model.memory.num_keys or lower top_k"
        )
    # A score is a product of a row and a column score, and each of those of a query and a key: the gain enters four
    # times. Host sync: at initialisation.
    return ScoreCalibration(gain=_round(mean**-0.25), sigma_s=_round(float(retrieved.std()) / mean))


def _unit_mean_square(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Random vectors as the norms deliver them at gain 1, fp64 on the CPU: mean square 1 over the last dimension."""
    out = torch.empty(shape, dtype=torch.float64)
    fill(out, Normal(1.0), seed=seed, name=name)
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True))


def _round(value: float) -> float:
    return round(value, 5 - math.floor(math.log10(abs(value))))
