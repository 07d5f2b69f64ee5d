"""Hidden matrices of tiny models by the names of their parameters, which the product never asks, and Muon's formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamem.config.model import ModelConfig

OF_LATENTS = {"linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"}
OF_MEMORIES = {"query_proj", "key_proj", "value_proj", "pre_value_proj", "silu_gate", "down_proj"}
WHOLE = {"linear_proj", "linear_fc2", *OF_LATENTS, *OF_MEMORIES}
SEVERAL = {"linear_qkv", "linear_fc1", "linear_kv_down_proj", "linear_kv_up_proj", "expansion"}


def is_matrix(name: str) -> bool:
    """True if a parameter of this name consists of hidden matrices."""
    return name.removesuffix(".weight").rpartition(".")[2] in WHOLE | SEVERAL


def matrices_in(name: str, weight: Tensor, model: ModelConfig) -> list[Tensor]:
    """The hidden matrices of a parameter on one rank, as views whose last dimension is their columns; none if it has
    none."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "linear_qkv":
        # Of each key/value head its queries, its key and its value.
        by_group = weight.view(model.query_groups, -1, model.attention_head_dim, weight.shape[1])
        queries = model.num_attention_heads // model.query_groups
        return [by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]]
    if part == "linear_fc1":
        return list(weight.chunk(2))
    if part == "linear_kv_down_proj":
        assert model.latent_attention is not None
        return list(weight.split((model.latent_attention.latent_dim, model.latent_attention.rotary_dim)))
    if part == "linear_kv_up_proj":
        # Of each head its key but for what is rotated, and its value.
        assert model.latent_attention is not None
        by_head = weight.view(model.num_attention_heads, -1, weight.shape[1])
        return list(by_head.split((by_head.shape[1] - model.attention_head_dim, model.attention_head_dim), 1))
    if part == "gate_proj":
        # STEM's is a feed-forward's; of others an output is the gate of a slot.
        return [weight] if any(memory.kind == "stem" for memory in model.memories) else []
    if part == "expansion":
        # MIDUS: a map for each head.
        return list(weight.unbind())
    return [weight] if part in WHOLE else []


@dataclass(frozen=True)
class MuonFormula:
    """Muon in float64: Newton-Schulz as a polynomial of singular values."""

    rate: float = 1.0
    decay: float | None = None
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    momentum: float = 0.95
    nesterov: bool = True
    num_steps: int = 5

    def direction(self, average: Tensor, gradient: Tensor) -> Tensor:
        """The update of a matrix [m, n] over its learning rate, given its momentum and gradient."""
        ahead = self.momentum * average + (1 - self.momentum) * gradient if self.nesterov else average
        left, values, right = torch.linalg.svd(ahead.double(), full_matrices=False)
        values = values / values.norm()
        for _ in range(self.num_steps):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        rows, columns = ahead.shape
        size = (
            0.2 * math.sqrt(max(rows, columns))
            if self.scale == "match_rms_adamw"
            else math.sqrt(max(1, rows / columns))
        )
        return size * (left * values) @ right

    def updated(
        self, name: str, model: ModelConfig, weight: Tensor, average: Tensor, gradient: Tensor, lr: float, decay: float
    ) -> tuple[Tensor, Tensor]:
        """Weight and momentum of a parameter of hidden matrices after an update at its group's rate and decay."""
        average = self.momentum * average + (1 - self.momentum) * gradient
        change = torch.zeros_like(weight)
        views = (matrices_in(name, each, model) for each in (average, gradient, change))
        for of_average, of_gradient, of_change in zip(*views, strict=True):
            columns = of_change.shape[-1]
            update = self.direction(of_average.reshape(-1, columns), of_gradient.reshape(-1, columns))
            of_change.copy_(update.view(of_change.shape))
        own = decay if self.decay is None else self.decay
        return weight * (1 - lr * self.rate * own) - lr * self.rate * change, average
