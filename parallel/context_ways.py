"""The ways of attention across cut sequences, by name."""

from __future__ import annotations

from typing import Literal

from megatron.core.process_groups_config import ProcessGroupCollection

from megamem.attention.core import SdpaCoreAttention
from parallel.context import GatheredAttention
from parallel.context_heads import HeadAttention
from parallel.context_ring import RingAttention

_WAYS: dict[str, type[SdpaCoreAttention]] = {"gather": GatheredAttention, "heads": HeadAttention, "ring": RingAttention}


def attention_core(groups: ProcessGroupCollection, way: Literal["gather", "heads", "ring"]) -> type[SdpaCoreAttention]:
    """The attention core without Transformer Engine: PyTorch's, or across ranks where sequences are cut."""
    return _WAYS[way] if groups.cp.size() > 1 else SdpaCoreAttention
