"""The record of the UltraMemV2 family."""

from __future__ import annotations

from functools import partial

from megamem.families.family import Family
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.releases.release import ULTRAMEMV2_RELEASE
from megamem.retrieval.costs import tucker_costs
from megamem.retrieval.initial import tucker_distribution, tucker_table_std
from megamem.retrieval.released import tucker_names

ULTRAMEM_V2 = Family(
    config=UltraMemV2Config,
    layer_path="megamem.families.ultramem_v2.layer:UltraMemV2Layer",
    costs=tucker_costs,
    distribution=partial(tucker_distribution, released_gain_exponent=-0.4),
    table_std=tucker_table_std,
    released={ULTRAMEMV2_RELEASE: tucker_names({"pre_values_proj.weight": "pre_value_proj"}, tables_in="model")},
)
