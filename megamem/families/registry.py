"""Registry of the families."""

from __future__ import annotations

from typing import Any

from megamem.config.memory import MemoryConfig
from megamem.families.engram.family import ENGRAM
from megamem.families.family import Family
from megamem.families.lave.family import LAVE
from megamem.families.linear_memory.family import LINEAR
from megamem.families.memory_plus.family import MEMORY_PLUS
from megamem.families.midus.family import MIDUS
from megamem.families.mome.family import MOME
from megamem.families.move.family import MOVE
from megamem.families.ngram_embedding.family import NGRAM_EMBEDDING
from megamem.families.peer.family import PEER
from megamem.families.pkm.family import PKM
from megamem.families.residual_ngrams.family import RESIDUAL_NGRAMS
from megamem.families.stem.family import STEM
from megamem.families.tide.family import TIDE
from megamem.families.ultramem.family import ULTRAMEM
from megamem.families.ultramem_v2.family import ULTRAMEM_V2
from megamem.families.value_ngrams.family import VALUE_NGRAMS

FAMILIES: dict[str, Family[Any]] = {
    family.kind: family
    for family in (
        ULTRAMEM_V2,  # The first is that of a `model.memory` without `kind`.
        ULTRAMEM,
        PKM,
        MEMORY_PLUS,
        PEER,
        LINEAR,
        MOVE,
        LAVE,
        VALUE_NGRAMS,
        MOME,
        TIDE,
        STEM,
        MIDUS,
        ENGRAM,
        RESIDUAL_NGRAMS,
        NGRAM_EMBEDDING,
    )
}
"""By `model.memory.kind`."""


def family_of(memory: MemoryConfig) -> Family[Any]:
    """The family of a layer with this config."""
    family = FAMILIES[memory.kind]
    assert isinstance(memory, family.config), f"a {type(memory).__name__} of kind {memory.kind}"
    return family
