"""The auxiliary losses of a step by block: this rank's sums, which one collective adds up, and means from the total."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamem.backbone.moe import ROUTER_LOSS_NAMES
from megamem.layers.losses import LOSS_NAMES
from megamem.layers.usage import block_number
from pretrain.engine.chunks import Chunk, unwrap


def _columns(chunks: Sequence[Chunk]) -> dict[str, tuple[int, int]]:
    """Columns in `auxiliary_sums` of each loss that is switched on, and of the tokens that it is a mean of.

    The same on every rank, whatever layers it has: the sums go through one collective.
    """
    if not chunks:
        return {}
    model = unwrap(chunks[0]).model_config
    weights = [memory.loss_weights for memory in model.memories]
    first_of_router = 1 + len(LOSS_NAMES)
    columns = {name: (1 + index, 0) for index, name in enumerate(LOSS_NAMES)}
    columns |= {name: (first_of_router + 1 + i, first_of_router) for i, name in enumerate(ROUTER_LOSS_NAMES)}
    return {
        name: where
        for name, where in columns.items()
        if any(getattr(each, name, 0) > 0 for each in weights)
        or getattr(model.moe, f"{name.removeprefix('moe_')}_loss_weight", 0) > 0
    }


def auxiliary_sums(chunks: Sequence[Chunk], device: torch.device) -> Tensor:
    """This rank's sums, [blocks, columns] fp64: tokens, then loss x tokens, of memories and then of routers.

    There are no rows if all losses are off.
    """
    num_blocks = unwrap(chunks[0]).model_config.num_layers if _columns(chunks) else 0
    width = 1 + len(LOSS_NAMES)
    sums = torch.zeros(num_blocks, width + 1 + len(ROUTER_LOSS_NAMES), dtype=torch.float64, device=device)
    if num_blocks:
        for model in map(unwrap, chunks):
            for layer in model.memory_layers:
                if layer.losses is not None:
                    sums[block_number(layer.name), :width] = layer.losses.sums
            for router in model.routers:
                sums[router.layer_number - 1, width:] = router.sums
    return sums


def auxiliary_means(sums: Sequence[float], chunks: Sequence[Chunk]) -> dict[str, dict[int, float]]:
    """Means over tokens by loss and block, of the losses that are on, from the flat sums over all ranks."""
    width = 2 + len(LOSS_NAMES) + len(ROUTER_LOSS_NAMES)
    rows = [sums[start : start + width] for start in range(0, len(sums), width)]
    return {
        name: {block: row[value] / row[tokens] for block, row in enumerate(rows) if row[tokens]}
        for name, (value, tokens) in _columns(chunks).items()
    }
