"""Megatron's GPTModel with memory banks that belong to the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.attention import SdpaCoreAttention
from megamem.backbone import block_spec
from megamem.bank import Bank, MakeBank
from megamem.block import MemorySite
from megamem.chunked_loss import ChunkedLoss
from megamem.config import ModelConfig
from megamem.families.registry import family_of
from megamem.inputs import Inputs, pack
from megamem.layers.layer import MemoryLayer, begin_step
from megamem.moe import Router
from megamem.parameters import parameter_device
from megamem.rotary import scaled_frequencies
from megamem.side_stream import SideStream
from megamem.slots import Site
from megamem.spans import Span


class MemoryGPTModel(GPTModel):
    """One model chunk: embedding (first chunk), blocks, output projection (last chunk), and the blocks' banks.

    Attributes:
        model_config: our config of the whole model.
        banks: this chunk's banks by global index, `banks.<index>.<table>` in checkpoints.
        reads_tokens: whether this chunk needs the microbatch: it has the embedding, the loss, or a memory that asks for
            tokens.
        weights_are_set: to be set by whoever fills the weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        *,
        layers: range,
        padded_vocab_size: int,
        sequence_length: int,
        loss_chunk_tokens: int | None,
        groups: ProcessGroupCollection,
        make_bank: MakeBank,
        attention_core: type[SdpaCoreAttention],
        kernels: Kernels,
        side_stream: SideStream,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        seed: int,
    ) -> None:
        """Build the chunk with unset weights; `megamem.initialisation.initialise` or a checkpoint fills them.

        Args:
            layers: global 0-based numbers of this chunk's blocks.
            padded_vocab_size: rows of the embedding.
            loss_chunk_tokens: see `pretrain.config.schema.TrainConfig`.
            attention_core: what attends where Transformer Engine does not.
            kernels: of the layers' retrieval; the banks have theirs.
            side_stream: where the memory of a block runs beside its feed-forward.
            vp_stage: index of the chunk on its rank; None without interleaving.
            seed: the run's seed, which keys the shuffles.

        Raises:
            ValueError: if a bank or a span would be split over chunks, or Transformer Engine is asked for and absent.
        """
        banks, sites = _memories(config, model, layers, make_bank, kernels=kernels, seed=seed, token_group=groups.tp_cp)
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(
                layers,
                config=config,
                implementation=model.implementation,
                attention_core=attention_core,
                qk_norm=model.qk_norm,
                sites=sites,
                groups=groups,
                side_stream=side_stream,
            ),
            vocab_size=padded_vocab_size,
            max_sequence_length=sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self.model_config = model
        if model.rotary_scaling is not None:
            rotary = self.rotary_pos_emb
            rotary.inv_freq = scaled_frequencies(rotary.inv_freq, model.rotary_scaling, model.rotary_base)
        self._memory_reads_tokens = bool(sites) and model.memory is not None and model.memory.reads_tokens
        self.reads_tokens = pre_process or post_process or self._memory_reads_tokens
        self.weights_are_set = False
        self.banks = nn.ModuleDict({str(index): bank for index, bank in banks.items()})
        self.chunked_loss: ChunkedLoss | None = None
        if post_process and loss_chunk_tokens is not None:
            self.chunked_loss = ChunkedLoss(loss_chunk_tokens, groups.tp)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: None = None,
        *,
        labels: Tensor | None = None,
    ) -> Tensor:
        """The chunk's part of a forward pass.

        Args:
            input_ids: [b, s] int64, the tokens of this context-parallel rank; None where the chunk does not read them.
            position_ids: [b, s] int64, their places in their sequences; None with `input_ids`.
            attention_mask: must be None; attention is causal.
            labels: [b, s] int64; None where logits are wanted.

        Returns:
            [t, b, D] of a chunk that is not the last one; else the losses [b, s] in nats, or the logits
            [b, s, vocabulary] without labels.
        """
        carried = None
        if self._memory_reads_tokens:
            assert input_ids is not None
            assert position_ids is not None
            carried = {"context_mask": pack(input_ids, position_ids)}
        out: Tensor = super().forward(
            input_ids, position_ids, attention_mask, labels=labels, extra_block_kwargs=carried
        )
        return out

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor | None, **others: Any) -> Tensor:
        """From the last hidden states of the chunk [t, b, D] to what `forward` returns."""
        if self.chunked_loss is None or labels is None or labels.numel() <= self.chunked_loss.chunk_tokens:
            # Logits of few tokens may as well be kept for backward.
            out: Tensor = super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
            return out
        losses: Tensor = self.chunked_loss(hidden_states, self.output_weight, labels)
        return losses

    @property
    def output_weight(self) -> nn.Parameter:
        """[V, D], this rank's part of the output projection; of chunks that have it."""
        tied = self.share_embeddings_and_output_weights
        weight: nn.Parameter = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    @property
    def memory_layers(self) -> list[MemoryLayer]:
        """This chunk's memory layers, in order."""
        return [site.memory for site in self._memory_sites()]

    @property
    def routers(self) -> list[Router]:
        """The routers of this chunk's mixtures of experts, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def set_memory_enabled(self, enabled: bool) -> None:
        """Switch the memory's output on or off in every block, for ablation."""
        for site in self._memory_sites():
            site.memory_enabled = enabled

    def serve_memory(self) -> None:
        """Take part, without a token, in the exchanges of a forward pass of other ranks of the memory group."""
        weight = next(self.parameters())
        no_token = weight.new_empty(0, 1, self.config.hidden_size)
        inputs = Inputs(torch.empty(2, 0, 1, dtype=torch.int64, device=weight.device))
        for site in self._memory_sites():
            if site.memory_enabled:
                site.serve(no_token, inputs)

    @property
    def decomposed_weights(self) -> list[nn.Parameter]:
        """The weights that `begin_step` reads."""
        return [layer.cores for layer in self.memory_layers if isinstance(layer.cores, nn.Parameter)]

    def begin_step(self) -> None:
        """To be called once per optimizer step, before its first microbatch; see `megamem.layers.layer.begin_step`."""
        assert self.weights_are_set, "neither initial weights nor a checkpoint's are in this chunk"
        begin_step(self.memory_layers)
        for router in self.routers:
            router.begin_step()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Megatron's checkpoint entries, and those of the banks."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        # Megatron's default has added the banks as modules that it knows nothing of: ours say how they are replicated.
        for name, bank in self.banks.items():
            assert isinstance(bank, Bank)
            entries.update(bank.sharded_state_dict(f"{prefix}banks.{name}.", sharded_offsets, metadata))
        return entries

    def _memory_sites(self) -> list[MemorySite]:
        return [module for module in self.decoder.modules() if isinstance(module, MemorySite)]


def _memory_indices(spans: Sequence[Span], layers: range) -> dict[int, int]:
    """Memory index by block, for the memories that read in a chunk's blocks `layers`.

    Raises:
        ValueError: if one of them adds in another chunk.
    """
    inside = {span.read: index for index, span in enumerate(spans) if span.read in layers}
    for span in spans:
        if (span.read in layers) != (span.add in layers):
            raise ValueError(
                f"the memory that reads at block {span.read} and adds after block {span.add} would span two pipeline "
                f"chunks (one holds blocks {layers.start}..{layers.stop - 1}): change model.memory.placement.spans, "
                "parallel.pipeline or parallel.virtual_pipeline"
            )
    return inside


def _memories(
    config: TransformerConfig,
    model: ModelConfig,
    layers: range,
    make_bank: MakeBank,
    *,
    kernels: Kernels,
    seed: int,
    token_group: torch.distributed.ProcessGroup,
) -> tuple[dict[int, Bank], dict[int, Site]]:
    """The banks of a chunk by global index, and its memories by the block that they read in.

    Arguments and errors are those of `MemoryGPTModel`.
    """
    memory, plan, spans = model.memory, model.memory_plan, model.memory_spans
    if memory is None:
        return {}, {}
    index_of = _memory_indices(spans, layers)
    indices = range(min(index_of.values(), default=0), max(index_of.values(), default=-1) + 1)
    device = parameter_device(config)
    banks = {
        spec.index: make_bank(spec, memory, dtype=config.params_dtype, device=device) for spec in plan.banks_of(indices)
    }
    sites = {}
    for layer, index in index_of.items():
        view, span = plan.views[index], spans[index]
        make_memory = partial(
            family_of(memory).layer(),
            config,
            memory,
            view,
            # Not the module itself: the bank belongs to the model, not to the layer.
            SimpleNamespace(read=banks[view.bank].read),
            kernels=kernels,
            name=model.memory_name(index),
            seed=seed,
            token_group=token_group,
        )
        sites[layer] = Site(memory.slot_of(span), span, make_memory)
    return banks, sites
