"""The record of MoVE."""

from __future__ import annotations

from megamem.families.family import Family
from megamem.families.move.config import MoveConfig
from megamem.token_tables.record import mixed_values_costs, mixed_values_distribution, mixed_values_table_std

MOVE = Family(
    config=MoveConfig,
    layer_path="megamem.token_tables.mixed_values:MixedValuesLayer",
    costs=mixed_values_costs,
    distribution=mixed_values_distribution,
    table_std=mixed_values_table_std,
)
