"""UltraMem, for everybody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamem.families.family import ULTRAMEMV2_RELEASE, Family
from megamem.families.ultramem.config import UltraMemConfig
from megamem.retrieval.costs import tucker_costs
from megamem.retrieval.initial import tucker_distributions, tucker_table_std
from megamem.retrieval.released import tucker_names

if TYPE_CHECKING:
    from megamem.layers.layer import MemoryLayer


def _layer() -> type[MemoryLayer]:
    # All that is UltraMem's own is in its config.
    from megamem.layers.tucker import TuckerLayer

    return TuckerLayer


ULTRAMEM = Family(
    config=UltraMemConfig,
    layer=_layer,
    costs=tucker_costs,
    distribution=tucker_distributions(released_gain_exponent=-0.33),
    table_std=tucker_table_std,
    released={ULTRAMEMV2_RELEASE: tucker_names()},
)
