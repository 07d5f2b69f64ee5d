"""Weights that a checkpoint need not hold, because the optimizer's fp32 main weights determine them.

After every update, and before the first, a weight is its main weight rounded to the dtype of the model: in bf16 that is
a cast to nearest even, in fp32 the same bits. So `optimizer.state.param.<weight>` stands for `<weight>`, in its own
global shape, and the weights of a checkpoint are those that are stored and those that follow. Buffers, and parameters
that are not trained, have no main weights and are always written.

A table that decays without its rows being touched has a scale, `optimizer.state.scale.<weight>`: its weights, and its main
weights, are that times what is stored under their names. Whoever reads either takes `scales_in` along.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pretrain.config.updates import SCALE, STATE_PREFIX

if TYPE_CHECKING:
    from pretrain.checkpoint.store.tensors import TensorReader

MAIN_PREFIX = f"{STATE_PREFIX}param."
SCALE_PREFIX = f"{STATE_PREFIX}{SCALE}."


def main_name(weight: str) -> str:
    """The name that a weight's fp32 main weights have in a checkpoint."""
    return f"{MAIN_PREFIX}{weight}"


def derived_weights(names: Iterable[str]) -> dict[str, str]:
    """Weights that a checkpoint does not store because one of its tensors determines them.

    Args:
        names: names of the tensors that are stored.

    Returns:
        The name of the fp32 tensor by the name of the weight, which is that tensor's cast to
        `SavedState.weights_dtype`. Weights that are stored themselves are not among them.
    """
    stored = set(names)
    return {
        weight: name
        for name in sorted(stored)
        if name.startswith(MAIN_PREFIX) and (weight := name.removeprefix(MAIN_PREFIX)) not in stored
    }


def is_moment(name: str) -> bool:
    """True if a tensor is of use to the optimizer alone: readers of the weights skip it."""
    return name.startswith(STATE_PREFIX) and not name.startswith((MAIN_PREFIX, SCALE_PREFIX))


def scales_in(reader: TensorReader) -> dict[str, float]:
    """Scales of the weights in a checkpoint that have one, by name of the weight; see above.

    Raises:
        CheckpointError: a scale cannot be read.
    """
    return {
        name.removeprefix(SCALE_PREFIX): float(reader.read(info.whole(name)))
        for name, info in reader.tensors.items()
        if name.startswith(SCALE_PREFIX)
    }
