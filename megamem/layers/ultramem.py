"""The UltraMem memory layer (UltraMemV2, section 2; Eq. 6-9)."""

from __future__ import annotations

from megamem.layers.ultramem_v2 import UltraMemV2Layer


class UltraMemLayer(UltraMemV2Layer):
    """UltraMemV2's ancestor: one query per side, implicit value expansion with a projection per virtual block, no pre-values.

    The config resolves these for `kind: ultramem` (`MemoryConfig.query_mode`, `num_value_blocks`, `pre_dim`), so the computation is that of
    the base class. Skip insertion is a matter of the placement, and sharing is open to it although the paper's tables are private.
    """
