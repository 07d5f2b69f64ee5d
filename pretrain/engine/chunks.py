"""Model chunks of a rank, as others than their builders see them."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import nn

from megamem.model import MemoryGPTModel

Chunk: TypeAlias = nn.Module
"""A model chunk, bare or under DDP."""


def unwrap(chunk: Chunk) -> MemoryGPTModel:
    """The bare model chunk under DDP and precision wrappers."""
    module: Any = chunk
    while not isinstance(module, MemoryGPTModel):
        module = module.module
    return module
