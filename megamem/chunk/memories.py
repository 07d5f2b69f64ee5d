"""The memories of one model chunk: banks of its own, layers that read them or an earlier chunk's, and their joint read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megamem.backbone.parts import Site
from megamem.banks.bank import Bank
from megamem.banks.controls import ControlledLookup
from megamem.chunk.machinery import Machinery
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.layers.shared_read import SharedRead
from megamem.parameters.declaration import Copy, parameter_device
from megamem.placement.block_plan import plan_blocks
from megamem.placement.spans import Span


def memories_of_chunk(
    config: TransformerConfig,
    model: ModelConfig,
    layers: range,
    machinery: Machinery,
    *,
    seed: int,
    stage: Copy,
    lent: Mapping[int, Bank],
) -> tuple[dict[int, Bank], dict[int, list[Site]]]:
    """The banks of a chunk by global index, and its memories by the block that they read in.

    Arguments and errors are those of `MemoryGPTModel`; `lent` are banks of earlier chunks by global index.
    """
    groups = machinery.groups
    own = _memory_indices(model.memory_spans, layers)
    indices = range(min(own, default=0), max(own, default=-1) + 1)
    device = parameter_device(config)
    banks = {
        spec.index: machinery.make_bank(
            spec,
            model.family_of_bank(spec.index),
            dtype=config.params_dtype,
            device=device,
            copy=stage if spec.on_every_stage else Copy(),
        )
        for spec in model.memory_plan.banks_of(indices)
        if spec.index not in lent
    }
    found = {**lent, **banks}
    sites: dict[int, list[Site]] = {}
    for placed in (model.memory_layers[index] for index in own):
        block = placed.span.read
        make_memory = partial(
            family_of(placed.memory).layer(),
            config,
            placed.memory,
            placed.view,
            _lookup(found[placed.view.bank], placed.memory),
            kernels=machinery.kernels,
            name=placed.name,
            seed=seed,
            token_group=groups.tp_cp,
            # Latents are whole tokens': heads are made of them behind a memory.
            tensor_group=groups.tp if model.latent_attention is None else None,
            halo=machinery.hidden_halo,
            num_streams=model.num_streams,
        )
        site = Site(placed, plan_blocks(model)[block], make_memory)
        sites.setdefault(block, []).append(site)
    return banks, sites


def joint_read(
    config: TransformerConfig,
    model: ModelConfig,
    banks: Mapping[int, Bank],
    sites: Mapping[int, Sequence[Site]],
    stage: Copy,
    groups: ProcessGroupCollection,
) -> SharedRead | None:
    """The read of the one bank of a family that reads once, before the chunk's first block, for all its layers of this
    rank; None if the chunk has no such layer.
    """
    memory = model.memory_read_once
    if memory is None or not any(site.plan.reads_once for of_block in sites.values() for site in of_block):
        return None
    (spec,) = model.banks_of(memory)
    bank, read = banks[spec.index], family_of(memory).shared_read()
    assert read is not None
    return read(
        config,
        memory,
        _lookup(bank, memory),
        kernels=bank.kernels,
        copy=stage,
        tensor_group=groups.tp,
        data_group=groups.dp_cp,
    )


def _memory_indices(spans: Sequence[Span], layers: range) -> list[int]:
    """Indices of the memories that read in a chunk's blocks `layers`, in the order of these.

    Raises:
        ValueError: a memory adds in another chunk than it reads in.
    """
    for span in spans:
        if span.queried is not None and (span.read in layers) != (span.queried in layers):
            raise ValueError(
                f"the memory of block {span.read} reads with the stream of block {span.queried}, of which one pipeline chunk "
                f"holds one alone (blocks {layers.start}..{layers.stop - 1}): change model.memory.placement.query_group, "
                "parallel.pipeline or parallel.virtual_pipeline"
            )
        if (span.read in layers) != (span.add in layers):
            raise ValueError(
                f"the memory that reads at block {span.read} and adds after block {span.add} would span two pipeline "
                f"chunks (one holds blocks {layers.start}..{layers.stop - 1}): change model.memory.placement.spans, "
                "parallel.pipeline or parallel.virtual_pipeline"
            )
    return [index for index, span in enumerate(spans) if span.read in layers]


def _lookup(bank: Bank, memory: MemoryConfig) -> Any:
    """Handle by which a layer reads a bank. Not the module itself: the bank belongs to the model, not to the layer."""
    handle = SimpleNamespace(read=bank.read, read_heads=bank.read_heads)
    return handle if memory.control == "none" else ControlledLookup(handle, memory.control)
