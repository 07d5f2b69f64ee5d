"""The configuration that ranks run, which plans and dry runs are of too. Imports no torch."""

from __future__ import annotations

from pretrain.config.graphs import without_overlap
from pretrain.config.schema import RunConfig
from pretrain.config.table_gradients import with_chosen_gradients


def settled(config: RunConfig) -> RunConfig:
    """The configuration with the choice of `optimizer.table_gradients: auto`, and without overlaps that a graph has no room for."""
    return without_overlap(with_chosen_gradients(config))
