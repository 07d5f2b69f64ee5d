"""A checkpoint of a pretrained model as one of a deeper model, which `pretrain.convert.convert` writes.

Legend: n heads of attention, d width of a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.initialisation.distributions import Constant
from megamem.initialisation.initialise import distribution_of
from megamem.initialisation.outputs import build_layer, initialised_layer
from megamem.placement.block_plan import PLAIN, BlockPlan, plan_blocks
from pretrain.checkpoint.store.tensors import TensorInfo
from pretrain.convert.format import OpenedCheckpoint
from pretrain.errors import CheckpointError
from pretrain.growth.config import grown_config
from pretrain.growth.plan import GrownBlock
from pretrain.growth.tensors import Drawn, Followed, GrownTensors, MeanOf, Origin
from pretrain.state import RunState

_IN_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NORM = "input_layernorm.weight"
_TO_RESIDUAL = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")


@dataclass(frozen=True)
class Grown:
    """A grown model that is yet to be written.

    Attributes:
        checkpoint: the grown model, as a checkpoint that was opened.
        inserted: numbers of its new blocks, from 0.
    """

    checkpoint: OpenedCheckpoint
    inserted: tuple[int, ...]


def upscale(base: OpenedCheckpoint, blocks: Sequence[GrownBlock], overrides: Sequence[str], *, name: str) -> Grown:
    """A model with these blocks, at the beginning of a run.

    Memories begin with tables of zeros, so that their blocks add nothing, whatever their other weights, which are those
    that a run with this seed would begin with. Those that stand around the feed-forward elsewhere are what an inserted
    block adds (`megamem.placement.slots.INSERTED`). The weights of the source are taken as they are, in their dtype.

    Args:
        base: the pretrained model's.
        blocks: blocks of the grown one.
        overrides: `model.memory.<key>=value`, which memory is inserted; and the seed.
        name: name of the run that goes on from it.

    Raises:
        ConfigError: the model has a memory already, or the keys do not fit.
        CheckpointError: the source lacks weights.
    """
    config = grown_config(base.config, blocks, overrides, name=name, origin=str(base.path))
    weights = base.weights_in(None)
    origins = dict(_origins(weights.tensors, config.model, blocks))
    if config.model.memory is not None:
        origins |= dict(_memory_origins(config.model, config.model.memory, _dtype_of(weights.tensors), config.seed))
    return Grown(
        replace(
            base,
            reader=GrownTensors(weights, origins, config.seed),
            config=config,
            state=RunState(),
            notes={"blocks": "; ".join(map(str, blocks))},
        ),
        tuple(number for number, block in enumerate(blocks) if block.inserted is not None),
    )


def _origins(
    tensors: Mapping[str, TensorInfo], model: ModelConfig, blocks: Sequence[GrownBlock]
) -> Iterator[tuple[str, Origin]]:
    """Everything but the memories: their blocks' attention is the source's."""
    in_block: dict[int, list[str]] = {}
    plans = plan_blocks(model)
    for name in tensors:
        if match := _IN_BLOCK.fullmatch(name):
            in_block.setdefault(int(match[1]), []).append(match[2])
        else:
            yield name, MeanOf((name,))
    for number, block in enumerate(blocks):
        if missing := [source for source in block.sources if source not in in_block]:
            raise CheckpointError(f"decoder.layers.{missing[0]}. has no weights, and the grown model needs them")
        plan = plans.get(number, PLAIN)
        for suffix in in_block[block.sources[-1]]:
            if suffix.startswith(_left_out(plan)):
                continue
            name = f"decoder.layers.{number}.{suffix}"
            sources = tuple(f"decoder.layers.{source}.{suffix}" for source in block.sources)
            if plan.has_layer_norm and suffix == _NORM:
                info = tensors[f"decoder.layers.{block.sources[0]}.{suffix}"]
                yield name.replace(".weight", ".bias"), Drawn(info, Constant(0.0))
            if block.inserted == "muted" and _TO_RESIDUAL.fullmatch(name):
                yield name, Drawn(tensors[sources[0]], Constant(0.0))
            else:
                yield name, MeanOf(sources)


def _left_out(plan: BlockPlan) -> tuple[str, ...]:
    """Beginnings of the names, within a block of the source, of weights that a block of this plan does not have."""
    parts = {
        "pre_mlp_layernorm.": plan.num_norms > 1,
        "mlp.": plan.has_ffn,
        "self_attention.linear_proj.": plan.has_output_projection,
    }
    return tuple(name for name, is_there in parts.items() if not is_there)


def _memory_origins(
    model: ModelConfig, memory: MemoryConfig, dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Origin]]:
    """The memories' own weights, and their tables. Weights that follow from others (Tucker layers' gains and
    singular vectors) are kept, of a layer that is made for it."""
    no_tables: Any = None
    for index in range(model.num_memory_layers):
        # It is asked for the shapes of its weights, and reads nothing.
        with FakeTensorMode():
            weights = build_layer(model, memory, index, no_tables, seed).state_dict()
        name = model.memory_name(index)
        drawn = {own: distribution_of(f"{name}.{own}", model) for own in weights}
        followed: Mapping[str, Tensor] = {}
        if None in drawn.values():
            layer, _ = initialised_layer(model, memory, index, no_tables, seed, dtype)
            followed = layer.state_dict()
        for own, weight in weights.items():
            distribution = drawn[own]
            if distribution is None:
                yield f"{name}.{own}", Followed(followed[own].detach().clone())
            else:
                yield f"{name}.{own}", Drawn(TensorInfo(tuple(weight.shape), dtype), distribution)
    for bank in model.memory_plan.banks:
        for table in memory.tables:
            info = TensorInfo((bank.num_rows, table.width), dtype)
            yield f"banks.{bank.index}.{table.name}", Drawn(info, Constant(0.0))


def _dtype_of(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The dtype of the weights, which new ones get."""
    return tensors["decoder.final_layernorm.weight"].dtype
