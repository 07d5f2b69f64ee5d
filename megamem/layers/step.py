"""What the memory layers of a model do once per optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from megamem.layers.layer import MemoryLayer
from megamem.losses import begin_losses


def begin_step(layers: Sequence[MemoryLayer]) -> None:
    """To be called once per optimizer step, before its first microbatch, and never at evaluation.

    Refreshes what the family keeps between steps, and restarts the auxiliary losses. Each takes one decomposition for all layers: on a GPU
    every call waits for the device.

    Args:
        layers: the memory layers of one model chunk.
    """
    if layers:
        type(layers[0]).refresh(layers)
    begin_losses([(layer.losses, layer.cores) for layer in layers if layer.losses is not None])
