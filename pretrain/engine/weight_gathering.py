"""Gathering the updated weights from the ranks that step them, while the next forward pass runs.

Every rank steps its share of the weights. Megatron's DDP then gathers them part by part: a module's forward waits for
the parts that it reads, and starts the next one. Ours adds what Megatron cannot know. A memory reads a bank, which is
no part of its layer and has no forward, and a chunked loss reads the output projection without its forward. A memory
may also read on a CUDA stream of its own, while the common stream does not wait again for a part that another has
waited for. So a block waits for all that its memory reads, on the common stream, before the memory starts. The Tucker
cores are decomposed once per step, for all layers at a time: the step starts by waiting for them, and for the parts
that they are in. In a model with such cores the tables are gathered beside forward, and little of the backbone.

Megatron starts a part when the one before it has been waited for. The tables of a bank are several parts that are read
at once, of which all but the first would then come while forward waits: so a bank's parts are started together, when
the bank before is read.

Between the steps, code that reads weights without a forward pass completes them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megamem.blocks.memory_sites import MemorySite
from megamem.layers.layer import MemoryLayer
from megamem.model import MemoryGPTModel
from pretrain.engine.parts import DdpPart, parts_of


def wait_before_memories(wrapped: DistributedDataParallel, model: MemoryGPTModel) -> None:
    """Have every block with a memory, a chunked loss and a branch wait for the weights that they read; for DDP that gathers
    beside forward."""
    for module, hook in wrapped.remove_forward_pre_hook_handles.items():
        # They wait for nothing. And a cache of Megatron's keeps rotary embeddings for ever, the model with their hook.
        if not any(True for _ in module.parameters(recurse=False)):
            hook.remove()
    banks = parts_of_banks(wrapped, model)
    following = {name: banks[after] for name, after in pairwise(banks)}
    for site in (module for module in model.modules() if isinstance(module, MemorySite)):
        layer = site.memory
        bank = str(layer.view.bank) if isinstance(layer, MemoryLayer) else ""
        # A bank that an earlier chunk holds has come before that chunk's own memories read it.
        wait = _waiting_for(_parts(wrapped, site.parameters()), banks.get(bank, ()), following.get(bank, ()))
        # The memory's own too: a memory that joins the stream after a later block is read without its site's forward.
        site.register_forward_pre_hook(wait)
        site.memory.register_forward_pre_hook(wait)
    if model.shared_read is not None:
        numbers = {str(layer.view.bank) for layer in model.memory_layers if layer.memory.reads_once}
        banks_read = (bank for number, bank in model.banks.items() if number in numbers)
        read = [*model.shared_read.parameters(), *(weight for bank in banks_read for weight in bank.parameters())]
        model.shared_read.register_forward_pre_hook(_waiting_for(_parts(wrapped, read)))
    if model.chunked_loss is not None:
        model.chunked_loss.register_forward_pre_hook(_waiting_for(_parts(wrapped, [model.output_weight])))
    if model.multi_token is not None:
        model.multi_token.register_forward_pre_hook(_waiting_for(_parts(wrapped, [model.input_weight])))


def _waiting_for(
    parts: Sequence[DdpPart], of_bank: Sequence[DdpPart] = (), following: Sequence[DdpPart] = ()
) -> Callable[[Any, Any], None]:
    """A hook before a module's forward that waits until these parts have come, and a bank's, and starts those of the
    bank that follows."""

    def wait(_module: Any, _inputs: Any) -> None:
        for part in parts:
            part.finish_param_sync()
        for part in of_bank:
            part.finish_param_sync(skip_next_bucket_dispatch=True)
        for part in following:
            if not part.param_gather_dispatched:
                part.start_param_sync()

    return wait


def parts_of_banks(wrapped: DistributedDataParallel, model: MemoryGPTModel) -> dict[str, list[DdpPart]]:
    """The parts of each bank that has some, in the order of use."""
    parts = {name: _parts(wrapped, bank.parameters()) for name, bank in model.banks.items()}
    return {name: of_bank for name, of_bank in parts.items() if of_bank}


def wait_for(chunk: DistributedDataParallel, parameters: Iterable[nn.Parameter]) -> None:
    """Have the stream wait until these weights have come, and start with what follows them."""
    if chunk.ddp_config.overlap_param_gather:
        for part in _parts(chunk, parameters):
            part.finish_param_sync()


def _parts(chunk: DistributedDataParallel, parameters: Iterable[nn.Parameter]) -> list[DdpPart]:
    """The parts that weights come in, each once, in the order of use. Those that are not trained are in none."""
    of_weight = chunk.param_to_bucket_group
    return list(dict.fromkeys(of_weight[parameter] for parameter in parameters if parameter in of_weight))


def start_gathering(chunks: Sequence[DistributedDataParallel]) -> None:
    """After an update: gather all weights, or start with those that the next forward pass reads first."""
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()
            continue
        model = next(module for module in chunk.modules() if isinstance(module, MemoryGPTModel))
        first_bank = next(iter(parts_of_banks(chunk, model).values()), [])
        for parts in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            for part in parts:
                if part.param_gather_handle is not None:
                    # Gathered for a forward pass that had no use for it.
                    part.start_param_sync(force_sync=True)
            # Parts are numbered from the end of the model.
            is_of_banks = parts is chunk.expert_parallel_bucket_groups and bool(first_bank)
            for part in first_bank if is_of_banks else parts[-1:]:
                part.start_param_sync()


def complete_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Have this rank's weights be those of the last update. Collective where gathering is under way."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for part in parts_of(chunk):
                if not part.param_gather_dispatched or part.param_gather_handle is not None:
                    part.start_param_sync(force_sync=True)
