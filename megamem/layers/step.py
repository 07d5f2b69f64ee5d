"""What the memory layers of a model do once per optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from megamem.layers.layer import MemoryLayer
from megamem.layers.ultramem_v2 import UltraMemV2Layer, update_singular_vectors
from megamem.losses import begin_losses


def begin_step(layers: Sequence[MemoryLayer]) -> None:
    """To be called once per optimizer step, before its first microbatch, and never at evaluation.

    Refreshes the singular vectors of the retrieval, and restarts the auxiliary losses. Each takes one decomposition for all layers: on a GPU
    every call waits for the device.

    Args:
        layers: the memory layers of one model chunk.
    """
    update_singular_vectors([layer for layer in layers if isinstance(layer, UltraMemV2Layer)])
    begin_losses([(layer.losses, layer.cores) for layer in layers if layer.losses is not None])
