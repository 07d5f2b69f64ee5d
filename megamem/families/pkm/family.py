"""The record of the PKM family."""

from __future__ import annotations

from megamem.families.family import Family
from megamem.families.pkm.config import PkmConfig
from megamem.releases.release import META_RELEASE
from megamem.retrieval.costs import product_key_costs
from megamem.retrieval.initial import product_key_distribution, product_key_table_std
from megamem.retrieval.released import META_QUERY, META_VALUES, meta_names

PKM = Family(
    config=PkmConfig,
    layer_path="megamem.layers.product_key:ProductKeyLayer",
    costs=product_key_costs,
    distribution=product_key_distribution,
    table_std=product_key_table_std,
    released={META_RELEASE: meta_names({**META_QUERY, **META_VALUES}, {"values.weight": "values"})},
)
