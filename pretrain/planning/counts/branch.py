"""Weights and bytes of one depth of a branch that predicts further tokens (`backbone/multi_token.py`), around its block."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from pretrain.config.schema import RunConfig


def branch_projection(model: ModelConfig) -> int:
    """Weights by which a hidden state and an embedding are joined; every rank has them."""
    return 2 * model.hidden_size**2


def branch_norms(model: ModelConfig) -> int:
    """Gains of the norms, which every rank has."""
    return 3 * model.hidden_size


def kept_around_branch(config: RunConfig, depth: int, tokens: int) -> float:
    """Bytes that backward needs besides what blocks keep: embedded tokens, two normed states side by side, the last norm's
    input and output, and a gradient that waits for the other depths'; recomputation leaves three of them."""
    states = depth * (3 if config.train.recompute == "full" else 7)
    return float(states * tokens * config.model.hidden_size * config.train.element_bytes)
