"""Monte-Carlo calibration of retrieval scores at initialisation (UltraMemV2, section 6.2).

The paper sets the gains of the query and key norms so that the mean retrieved score is 1, and feeds the scores'
standard deviation sigma_s into Eq. 22. Both are measured here on the layer's own cores, with random normalised queries
and keys, through the real retrieval.

Legend: T tokens, H heads, N keys per side, d key dim, R Tucker rank, C cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.distributions import Normal
from megamem.random_fill import fill
from megamem.retrieval.config import TuckerConfig
from megamem.retrieval.tucker import leading_singular_vectors, retrieve

_SAMPLE_TOKENS = 128


@dataclass(frozen=True)
class ScoreCalibration:
    """Statistics of the retrieved scores that initialisation needs.

    Attributes:
        gain: of the query norm and of the key norm, at which the mean retrieved score of a core is 1.
        sigma_s: standard deviation of the retrieved scores of a core at that gain.
    """

    gain: float
    sigma_s: float


@torch.no_grad()
def calibrate_scores(memory: TuckerConfig, num_keys: int, cores: Tensor, *, seed: int, name: str) -> ScoreCalibration:
    """Measure the scores that a layer will retrieve.

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
    wide = cores.detach().cpu().double()
    zeros = torch.zeros(heads, rank, dtype=torch.float64)
    u, v = leading_singular_vectors(wide.sum(0), zeros, zeros)
    retrieved = retrieve(scores[0], scores[1], wide, u, v, row_top_k=memory.row_top_k, top_k=memory.top_k).scores
    mean = float(retrieved.mean())
    if mean <= 0:
        raise ValueError(
            f"the mean retrieved score of {name} is {mean:.3g} at initialisation, which no norm gain turns into 1: "
            "raise model.memory.num_keys or lower top_k"
        )
    # A score is a product of a row and a column score, and each of those of a query and a key: the gain enters four
    # times.
    return ScoreCalibration(gain=_round(mean**-0.25), sigma_s=_round(float(retrieved.std()) / mean))


def _unit_mean_square(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Random vectors as the norms deliver them at gain 1, fp64 on the CPU: mean square 1 over the last dimension."""
    out = torch.empty(shape, dtype=torch.float64)
    fill(out, Normal(1.0), seed=seed, name=name)
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True))


def _round(value: float) -> float:
    return round(value, 5 - math.floor(math.log10(abs(value))))
