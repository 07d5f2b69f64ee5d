"""Which class is the memory layer of which kind."""

from __future__ import annotations

from megamem.config import MemoryKind
from megamem.layers.layer import MemoryLayer
from megamem.layers.product_key import MemoryPlusLayer, PeerLayer, ProductKeyLayer
from megamem.layers.ultramem import UltraMemLayer
from megamem.layers.ultramem_v2 import UltraMemV2Layer


def layer_class(kind: MemoryKind) -> type[MemoryLayer]:
    """The layer of `model.memory.kind`."""
    classes: dict[MemoryKind, type[MemoryLayer]] = {
        "ultramem_v2": UltraMemV2Layer,
        "ultramem": UltraMemLayer,
        "pkm": ProductKeyLayer,
        "memory_plus": MemoryPlusLayer,
        "peer": PeerLayer,
    }
    return classes[kind]
