"""The record of the PEER family."""

from __future__ import annotations

from megamem.families.family import Family
from megamem.families.peer.config import PeerConfig
from megamem.releases.release import META_RELEASE
from megamem.retrieval.costs import product_key_costs
from megamem.retrieval.initial import product_key_distribution, product_key_table_std
from megamem.retrieval.released import META_QUERY, meta_names

PEER = Family(
    config=PeerConfig,
    layer_path="megamem.families.peer.layer:PeerLayer",
    costs=product_key_costs,
    distribution=product_key_distribution,
    table_std=product_key_table_std,
    released={META_RELEASE: meta_names(META_QUERY, {"values_u.weight": "pre_values", "values_v.weight": "values"})},
)
