"""PKM, for everybody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamem.families.family import META_RELEASE, Family
from megamem.families.pkm.config import PkmConfig
from megamem.retrieval.costs import product_key_costs
from megamem.retrieval.initial import product_key_distribution, product_key_table_std
from megamem.retrieval.released import META_QUERY, META_VALUES, meta_names

if TYPE_CHECKING:
    from megamem.layers.layer import MemoryLayer


def _layer() -> type[MemoryLayer]:
    # All that is PKM's own is in its config.
    from megamem.layers.product_key import ProductKeyLayer

    return ProductKeyLayer


PKM = Family(
    config=PkmConfig,
    layer=_layer,
    costs=product_key_costs,
    distribution=product_key_distribution,
    table_std=product_key_table_std,
    released={META_RELEASE: meta_names({**META_QUERY, **META_VALUES}, {"values.weight": "values"})},
)
