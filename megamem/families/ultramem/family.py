"""The record of the UltraMem family."""

from __future__ import annotations

from functools import partial

from megamem.families.family import Family
from megamem.families.ultramem.config import UltraMemConfig
from megamem.releases.release import ULTRAMEMV2_RELEASE
from megamem.retrieval.costs import tucker_costs
from megamem.retrieval.initial import tucker_distribution, tucker_table_std
from megamem.retrieval.released import tucker_names

ULTRAMEM = Family(
    config=UltraMemConfig,
    layer_path="megamem.layers.tucker:TuckerLayer",
    costs=tucker_costs,
    distribution=partial(tucker_distribution, released_gain_exponent=-0.33),
    table_std=tucker_table_std,
    released={ULTRAMEMV2_RELEASE: tucker_names()},
)
