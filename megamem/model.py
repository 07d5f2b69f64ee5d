"""A chunk of the model: embedding, blocks, output projection and loss, and the memory banks, which belong to it.

Megatron makes the embedding and the output projection, and ties them over pipeline stages (`LanguageModule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamem.attention.kv_cache import KeyValueCache
from megamem.attention.rotary import rotary_angles, rotary_turns, scaled_frequencies
from megamem.backbone.chunked_loss import ChunkedLoss, judge
from megamem.backbone.moe import Router
from megamem.backbone.multi_token import MultiTokenPrediction
from megamem.backbone.norm import RMSNorm
from megamem.backbone.parts import Parts
from megamem.backbone.specs import backbone_parts
from megamem.banks.bank import Bank
from megamem.blocks.build import build_blocks
from megamem.blocks.memory_sites import MemorySite
from megamem.blocks.stack import BlockStack
from megamem.chunk.halo import UNCUT, Halo
from megamem.chunk.inputs import Inputs, pack
from megamem.chunk.machinery import Machinery
from megamem.chunk.memories import joint_read, memories_of_chunk
from megamem.config.model import ModelConfig
from megamem.layers.layer import MemoryLayer, begin_step, by_family
from megamem.layers.shared_read import SharedRead
from megamem.parameters.declaration import Copy
from megamem.parameters.trained_part import NO_BLOCK, TrainedPart, readers_of_bank
from megamem.residual_streams.message import sized_for_messages

_ALL_TOKENS = 1 << 62
"""More tokens than a microbatch has."""


class MemoryGPTModel(LanguageModule):
    """One model chunk: embedding (first chunk), blocks, output projection (last chunk), and the blocks' banks.

    Attributes:
        model_config: our config of the whole model.
        banks: this chunk's banks by global index, `banks.<index>.<table>` in checkpoints.
        memory_layers: this chunk's memory layers, in order.
        routers: the routers of this chunk's mixtures of experts, in order.
        separate_documents: attention needs the documents' bounds.
        reads_tokens: this chunk needs the microbatch: it has the embedding, the loss, or a memory that asks for tokens,
            or documents are separate.
        weights_are_set: set by whoever fills the weights.
        input_needs_gradient: the backward pass goes on in the chunk before this one.
        output_needs_gradient: there is a backward pass in this chunk, or in one before it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        machinery: Machinery,
        *,
        layers: range,
        has_embedding: bool,
        has_loss: bool,
        padded_vocab_size: int,
        loss_chunk_tokens: int | None,
        recompute_streams: int | None,
        separate_documents: bool,
        vp_stage: int | None,
        stage: Copy,
        earlier: Sequence[MemoryGPTModel],
        seed: int,
    ) -> None:
        """Build the chunk with unset weights; `megamem.initialisation.initialise` or a checkpoint fills them.

        Args:
            layers: global 0-based numbers of this chunk's blocks.
            has_embedding: the model begins with this chunk.
            has_loss: the model ends with it.
            padded_vocab_size: rows of the embedding.
            loss_chunk_tokens: tokens whose logits the loss holds at a time (`pretrain.config.schema.TrainConfig`).
            recompute_streams: blocks between which backward mixes residual streams again; None: it keeps those of every site.
            separate_documents: positions start anew at every document, and each chunk asks for them.
            vp_stage: index of the chunk on its rank; None without interleaving.
            stage: this rank's stage, of those of the pipeline.
            earlier: the chunks of this rank that were built before, which lend it the banks that every stage holds.
            seed: the run's seed, which keys the shuffles.

        Raises:
            ValueError: a bank or a span would be split over chunks, or Transformer Engine is asked for and absent.
        """
        groups = machinery.groups
        lent: dict[int, Bank] = {bank.spec.index: bank for chunk in earlier for bank in chunk.own_banks}
        banks, sites = memories_of_chunk(
            config,
            model,
            layers,
            machinery,
            seed=seed,
            stage=stage,
            lent=lent,
        )
        parts = backbone_parts(config, model, machinery)
        # Megatron's schedules size messages by the chunk's own config alone.
        super().__init__(config=sized_for_messages(config, model.residual_streams), pg_collection=groups)
        self.model_config, self._machinery = model, machinery
        # Megatron asks for these names.
        self.pre_process, self.post_process, self.vp_stage = has_embedding, has_loss, vp_stage
        self.share_embeddings_and_output_weights = model.tied_embeddings
        self._received: Tensor | None = None
        self._make_embedding(config, padded_vocab_size)
        self._gives_turns = parts.rotated_heads is not None
        self.decoder = BlockStack(
            config,
            build_blocks(config, layers, parts, sites, groups, model.residual_streams, machinery.kernels),
            final_layernorm=parts.norm,
            groups=groups,
            streams=model.residual_streams,
            recompute_streams=recompute_streams,
            kernels=machinery.kernels,
            is_first=has_embedding,
            is_last=has_loss,
        )
        self._make_output(config, padded_vocab_size)
        self.layers = layers
        # Asked for at every microbatch, and a walk over all modules costs the host a microsecond for each.
        self._memory_sites = _sites_of(self.decoder)
        self.memory_layers: list[MemoryLayer] = [site.memory for site in self._memory_sites]
        self._joint_address = _give_addresses(self.memory_layers)
        self._memory_reads_tokens = any(layer.memory.reads_tokens for layer in self.memory_layers)
        self.separate_documents = separate_documents
        self.reads_tokens = has_embedding or has_loss or self._memory_reads_tokens or separate_documents
        self.weights_are_set = False
        self.input_needs_gradient = self.output_needs_gradient = True
        self.banks = nn.ModuleDict({str(index): bank for index, bank in banks.items()})
        self.shared_read: SharedRead | None = None
        # One that an earlier chunk holds is not a module of this one.
        self._read_together: list[SharedRead] = list(earlier[-1].read_together) if earlier else []
        if not self._read_together:
            self.shared_read = joint_read(config, model, banks, sites, stage, groups)
            self._read_together = [] if self.shared_read is None else [self.shared_read]
        self.chunked_loss: ChunkedLoss | None = None
        self.multi_token: MultiTokenPrediction | None = None
        if has_loss:
            self._make_losses(loss_chunk_tokens, parts)
        # Asked for at every step, as memories are at every microbatch.
        self.routers = [module for module in self.modules() if isinstance(module, Router)]
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.normalise = machinery.kernels.rms_norm

    def _make_embedding(self, config: TransformerConfig, padded_vocab_size: int) -> None:
        """Give the first chunk its embedding, and each the frequencies of rotary positions."""
        groups = self._machinery.groups
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=padded_vocab_size,
                # Asked for by learned positions alone.
                max_sequence_length=0,
                position_embedding_type="none",
                tp_group=groups.tp,
            )
        if self.model_config.rotary_width:
            self.rotary_pos_emb = _rotary(config, self.model_config, groups)

    def _make_output(self, config: TransformerConfig, padded_vocab_size: int) -> None:
        """Give the last chunk its output projection, and have Megatron tie or count what both ends hold."""
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                padded_vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.model_config.tied_embeddings,
                tp_group=self._machinery.groups.tp,
            )
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        for module in self.modules():
            if hasattr(module, "finish_init"):
                # Transformer Engine's, of recipes for narrower numbers.
                module.finish_init(None)

    def _make_losses(self, chunk_tokens: int | None, parts: Parts) -> None:
        """Give the last chunk its loss in chunks, and the branch that predicts further tokens, where asked for."""
        ahead = self.model_config.multi_token_prediction
        if chunk_tokens is None and ahead is None:
            return
        groups = self._machinery.groups
        self.chunked_loss = ChunkedLoss(chunk_tokens or _ALL_TOKENS, groups.tp, self._machinery.kernels)
        if ahead is not None:
            self.multi_token = MultiTokenPrediction(
                self.config, ahead, parts, self.chunked_loss, groups, blocks_before=self.layers.stop
            )

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        document_bounds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        asked: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The chunk's part of a forward pass.

        Args:
            input_ids: [b, s] int64, the tokens of this context-parallel rank; None where the chunk does not read them.
            position_ids: [b, s] int64, their places in their sequences; None with `input_ids`.
            document_bounds: [D + 1] int64 in host memory, of the documents in whole sequences (`attention/`); None:
                every sequence is one document.
            labels: [b, s] int64, or [1 + n, b, s] with those of the tokens that a branch predicts, too
                (`megamem.backbone.multi_token`); None where logits are wanted.
            asked: [b, s], not 0 where labels are to be judged instead; without gradients.
            cache: the tokens that the model has seen of these sequences, which go on with `input_ids`; for evaluation
                alone, and without bounds.

        Returns:
            [t, b, D] of a chunk that is not the last one, or a message [t, b, W] of several residual streams; else the losses
            [b, s] in nats, or the logits [b, s, vocabulary] without labels (with a cache those of the last token,
            [b, 1, vocabulary]), or what `megamem.backbone.chunked_loss.judge` says [2, b, s].
        """
        assert cache is None or not (self.training or document_bounds is not None)
        inputs = Inputs(None, cache=cache, document_bounds=document_bounds)
        if self._memory_reads_tokens:
            assert input_ids is not None
            assert position_ids is not None
            for bank in self.own_banks:
                bank.announce(input_ids)
            inputs = replace(inputs, packed=self._packed(input_ids, position_ids, self._machinery.token_halo, cache))
            for read in self._joint_reads():
                own = inputs.share(self.tp_group) if self.config.sequence_parallel else inputs
                inputs = replace(inputs, read=read(own, self._joint_address))
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else self._received
        assert hidden is not None
        inputs = replace(inputs, turns=self._turns(hidden, position_ids, cache))
        hidden = self.decoder(hidden, inputs)
        if cache is not None:
            assert input_ids is not None
            cache.advance(input_ids.shape[1])
        return self._output(hidden, inputs, labels, asked) if self.post_process else hidden

    def _turns(self, hidden: Tensor, position_ids: Tensor | None, cache: KeyValueCache | None) -> Tensor | None:
        """`Inputs.turns`, of the tokens' own positions where documents are separate, and with a cache."""
        if not self.model_config.rotary_width:
            return None
        if self.separate_documents or cache is not None:
            assert position_ids is not None
            angles = rotary_angles(self.rotary_pos_emb.inv_freq, position_ids)
        else:
            over_ranks = self.config.context_parallel_size
            if self.config.sequence_parallel:
                over_ranks *= self.config.tensor_model_parallel_size
            angles = self.rotary_pos_emb(len(hidden) * over_ranks)
        return rotary_turns(angles) if self._gives_turns else angles

    def _output(self, hidden: Tensor, inputs: Inputs, labels: Tensor | None, asked: Tensor | None) -> Tensor:
        """The results of `forward` from the last hidden states [t, b, D]; losses of a branch are attached to them."""
        if self.multi_token is not None and labels is not None and labels.dim() == 3:
            hidden = self.multi_token(hidden, labels, self.input_weight, self.output_weight, inputs)
            labels = labels[0]
        if labels is not None and asked is not None:
            chunk_tokens = self.chunked_loss.chunk_tokens if self.chunked_loss else labels.numel()
            return judge(hidden, self.output_weight, labels, asked, chunk_tokens, self.pg_collection.tp)
        if self.chunked_loss is not None and labels is not None and labels.numel() > self.chunked_loss.chunk_tokens:
            losses: Tensor = self.chunked_loss(hidden, self.output_weight, labels)
            return losses
        # Logits of few tokens may as well be kept for backward.
        is_generating = inputs.cache is not None
        logits, _ = self.output_layer(
            hidden[-1:] if is_generating else hidden,
            weight=self.output_weight if self.share_embeddings_and_output_weights else None,
            runtime_gather_output=True if is_generating else None,
        )
        if labels is None:
            whole: Tensor = logits.transpose(0, 1).contiguous()
            return whole
        out: Tensor = self.compute_language_model_loss(labels, logits)
        return out

    def train_only(self, part: TrainedPart) -> None:
        """Leave gradients to a part of the model. To be called before anybody asks which parameters have some.

        All other parameters keep their values: they get no gradient, and backward ends at the lowest block that holds
        something trained.
        """
        if part.is_whole:
            return
        tables = self.tables
        for parameter, served in self.blocks_served().items():
            parameter.requires_grad_(part.trains(served, is_table=parameter in tables))
        self.input_needs_gradient = part.first_block < self.layers.start
        self.output_needs_gradient = part.first_block < self.layers.stop
        self.decoder.first_recomputed = max(0, part.first_block - self.layers.start)

    def blocks_served(self) -> dict[nn.Parameter, frozenset[int]]:
        """The blocks, counted from the model's first, that each of this chunk's parameters serves; see
        `megamem.parameters.trained_part`."""
        served: dict[nn.Parameter, frozenset[int]] = dict.fromkeys(self.parameters(), NO_BLOCK)
        for block, layer in zip(self.layers, self.decoder.layers, strict=True):
            served.update(dict.fromkeys(layer.parameters(), frozenset({block})))
        for bank in self.own_banks:
            served.update(dict.fromkeys(bank.parameters(), readers_of_bank(self.model_config, bank.spec)))
        if self.shared_read is not None:
            readers = frozenset(span.read for span in self.model_config.memory_spans)
            served.update(dict.fromkeys(self.shared_read.parameters(), readers))
        return served

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Take the output of the chunk before this one from Megatron's schedules, before `forward`."""
        (received,) = input_tensor if isinstance(input_tensor, list) else (input_tensor,)
        if received is not None and not self.input_needs_gradient:
            if self.config.virtual_pipeline_model_parallel_size is not None and torch.is_grad_enabled():
                # Interleaved chunks exchange a gradient for every output, wanted or not.
                received.grad = torch.zeros_like(received)
            # Backward ends here.
            received = received.detach()
        self._received = received

    def rows_read(self, token_ids: Tensor, positions: Tensor) -> dict[int, Tensor]:
        """Rows of this chunk's banks, by index, that a forward pass of whole sequences reads: known without it.

        Args:
            token_ids: [b, s] int64, on the device.
            positions: [b, s] int64.
        """
        found: dict[int, Tensor] = {}
        for layers in by_family(self.memory_layers):
            found |= type(layers[0]).rows_read(layers, token_ids.t(), positions.t())
        return found

    @property
    def own_banks(self) -> list[Bank]:
        """The banks that this chunk holds."""
        return [bank for bank in self.banks.values() if isinstance(bank, Bank)]

    @property
    def tables(self) -> frozenset[nn.Parameter]:
        """The tables of these banks."""
        return frozenset(table for bank in self.own_banks for table in bank.parameters())

    @property
    def read_together(self) -> Sequence[SharedRead]:
        """Joint reads of this chunk's memory layers before its first block: one of its own, one of an earlier chunk on
        this rank, or none."""
        return self._read_together

    @property
    def output_weight(self) -> nn.Parameter:
        """[V, D], this rank's part of the output projection; of chunks that have it."""
        tied = self.share_embeddings_and_output_weights
        weight: nn.Parameter = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    @property
    def input_weight(self) -> nn.Parameter:
        """[V, D], this rank's part of the input embedding; of chunks that have it, or are lent it by the output."""
        weight: nn.Parameter = self.embedding.word_embeddings.weight if self.pre_process else self.output_weight
        return weight

    def set_memory_enabled(self, enabled: bool, name: str | None = None) -> None:
        """Switch the memory's output on or off, for ablation: in every block, or of the layer of a global name."""
        for site in self._memory_sites:
            if name is None or site.memory.name == name:
                site.memory_enabled = enabled

    def _joint_reads(self) -> Sequence[SharedRead]:
        """The joint reads that layers of this chunk weigh."""
        return self.read_together if any(layer.memory.reads_once for layer in self.memory_layers) else ()

    def serve_memory(self) -> None:
        """Take part, without a token, in the exchanges of a forward pass of other ranks of the memory group."""
        weight = next(self.parameters())
        no_token = weight.new_empty(0, 1, self.model_config.hidden_size)
        no_id = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
        inputs = Inputs(self._packed(no_id, no_id, UNCUT))
        for read in self._joint_reads():
            inputs = Inputs(inputs.packed, read(inputs, self._joint_address))
        for site in self._memory_sites:
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
        if self.multi_token is not None:
            self.multi_token.begin_step()

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

    def _packed(self, token_ids: Tensor, positions: Tensor, halo: Halo, cache: KeyValueCache | None = None) -> Tensor:
        """[2 + A, s, b], see `megamem.chunk.inputs.pack`, of token ids and positions [b, s]; a cache has the tokens before them."""
        packed = pack(token_ids, positions)
        parts = [packed]
        for layers in by_family(self.memory_layers):
            # Families look back at more or fewer tokens, so a cache keeps each one's own.
            before = halo if cache is None else cache.halo(layers[0].memory.kind)
            addresses = type(layers[0]).addresses(layers, packed[0], packed[1], before)
            parts += [] if addresses is None else [addresses]
        return torch.cat(parts)


def _sites_of(decoder: BlockStack) -> list[MemorySite]:
    """Places of the memories of a chunk, in the order of a forward pass, which ranks without a token follow."""
    found: list[MemorySite] = []
    for block in decoder.layers:
        of_block = [module for module in block.modules() if isinstance(module, MemorySite)]
        found += sorted(of_block, key=lambda site: not site.is_at_entry)
    return found


def _give_addresses(layers: Sequence[MemoryLayer]) -> int:
    """Say to memory layers their places among those of their family, and where their addresses begin among all of a chunk.

    Returns:
        Beginning of the addresses that a chunk's layers read together.
    """
    first_address = 0
    for of_family in by_family(layers):
        for place, layer in enumerate(of_family):
            layer.place, layer.first_address = place, first_address
        first_address += of_family[0].memory.num_addresses(len(of_family))
    return next((layer.first_address for layer in layers if layer.memory.reads_once), 0)


def _rotary(config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection) -> RotaryEmbedding:
    """Megatron's angles of RoPE, of which it gives a context-parallel rank its own."""
    rotary = RotaryEmbedding(
        kv_channels=config.kv_channels,
        # Megatron rounds the turned columns of a head down.
        rotary_percent=1.0 if model.latent_attention is None else (model.rotary_width + 0.5) / model.attention_head_dim,
        rotary_base=model.rotary_base,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=groups.cp,
    )
    if model.rotary_scaling is not None:
        rotary.inv_freq = scaled_frequencies(rotary.inv_freq, model.rotary_scaling, model.rotary_base)
    return rotary
