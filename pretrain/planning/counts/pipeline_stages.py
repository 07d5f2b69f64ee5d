"""Parts of the model in every pipeline stage of a layout, and the division of tokens and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.layers.costs import LayerCosts
from megamem.parameters.trained_part import TrainedPart, readers_of_bank
from megamem.placement.block_plan import PLAIN, BlockPlan, plan_blocks, reads_beside_ffn
from megamem.placement.placed import PlacedMemory
from megamem.placement.sharing import BankSpec
from parallel.layout import padded_size
from parallel.pipeline_layout import ModelChunk, chunks_of_stage, model_chunks
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.attention import attention_biases, attention_weights, norm_weights, projected_twice
from pretrain.planning.counts.branch import branch_norms, branch_projection
from pretrain.planning.counts.formulas import shared_parameters
from pretrain.planning.counts.matrices import HiddenMatrices
from pretrain.planning.counts.residual_streams import end_weights, last_norm, num_norms, site_weights


@dataclass(frozen=True)
class TrainedWeights:
    """Weights of a stage that have gradients and optimizer state, see `Stage`; the hidden matrices are among the others."""

    split: int
    whole: int
    table_elements: int
    experts: int
    matrices: HiddenMatrices


@dataclass(frozen=True)
class Blocks:
    """Some blocks of a stage.

    Attributes:
        num: blocks.
        norms: norms of hidden states.
        unprojected: blocks whose attention has no output projection.
        ffns: feed-forwards.
        split_weights: weights that tensor-parallel ranks split, without those of memories.
        expert_weights: weights of experts.
        memories: memory layers.
        split_latents: blocks that make keys and values of latents that differ.
        weights_used_twice: weights, split by ranks, that multiply both of these latents.
        beside: memory layers that read while their block's feed-forward runs, where they have a stream for it.
        arrivals: outputs of memories that blocks are handed beside the hidden states, to join after them or later, and
            streams that memories of several blocks read with.
    """

    num: int
    norms: int
    unprojected: int
    ffns: int
    split_weights: int
    expert_weights: int
    memories: int
    beside: int
    split_latents: int
    weights_used_twice: int
    arrivals: int


@dataclass(frozen=True)
class FamilyInStage:
    """Memory layers of one family in a stage.

    Attributes:
        memory: config of the layers.
        costs: costs of all these layers, without their tables.
        layers: number of the layers.
        table_elements: elements of the tables that they read.
        lookups: rows of the bank that each layer reads, or each chunk, if its layers read together.
        backward_lookups: rows of the bank of each lookup that has a backward pass.
        window: mean share of its bank's rows that a layer sees. Tables of token ids have no rows before the tokenizer is known.
    """

    memory: MemoryConfig
    costs: LayerCosts
    layers: int
    table_elements: int
    lookups: tuple[int, ...]
    backward_lookups: tuple[int, ...]
    window: float = 1.0

    def rows_seen(self, bank_rows: int) -> int:
        """Rows that a lookup in a bank of so many can read."""
        return round(self.window * bank_rows)


@dataclass(frozen=True)
class BankInStage:
    """A bank of a stage whose tables are trained.

    Attributes:
        memory: config of the layers that read it.
        elements: elements of its tables.
        chunk: the first of the stage's chunks that reads it.
        blocks_below: blocks of that chunk below the first that reads it: when backward is there, its gradient is
            complete, and when forward is, it is needed.
        on_every_stage: True if every stage holds a copy of it (`megamem.placement.sharing.BankSpec`).
    """

    memory: MemoryConfig
    elements: int
    chunk: int
    blocks_below: int
    on_every_stage: bool

    @property
    def num_rows(self) -> int:
        return self.elements // self.memory.row_width


@dataclass(frozen=True)
class Stage:
    """One stage's part of the model, before tensor parallelism and the memory group split it.

    Attributes:
        chunks: parts of the depth, in the order of its virtual stages.
        blocks: all blocks; a branch's come behind those of the chunk with the loss.
        backward: blocks that have a backward pass. A lowest block whose table alone is trained is counted whole;
            without recomputation it has one only from the read onwards.
        trained_blocks: blocks of `backward` that are trained; the others pass gradients on.
        gradients_sent: chunks that hand gradients to the chunk before.
        split_weights: weights that tensor-parallel ranks split.
        whole_weights: weights that every rank holds.
        table_elements: elements of tables.
        expert_weights: weights of experts.
        families: memory layers, by their family.
        trained: weights that are trained.
        trained_banks: banks with trained tables, in the order in which forward reads them.
        branch_blocks: blocks of a branch that predicts further tokens.
        trains_all: True if all of the model is trained, embedding and output projection too.
    """

    chunks: tuple[ModelChunk, ...]
    blocks: Blocks
    backward: Blocks
    trained_blocks: Blocks
    gradients_sent: int
    split_weights: int
    whole_weights: int
    table_elements: int
    expert_weights: int
    families: tuple[FamilyInStage, ...]
    trained: TrainedWeights
    trained_banks: tuple[BankInStage, ...]
    branch_blocks: int
    trains_all: bool

    @property
    def has_embedding(self) -> bool:
        return any(chunk.has_embedding for chunk in self.chunks)

    @property
    def has_loss(self) -> bool:
        return any(chunk.has_loss for chunk in self.chunks)

    @property
    def memory(self) -> LayerCosts:
        """Costs of its memory layers without their tables."""
        return sum((family.costs for family in self.families), LayerCosts())

    def trained_elements(self, memory: MemoryConfig) -> int:
        """Trained ones of the elements of a family's tables."""
        return sum(bank.elements for bank in self.trained_banks if bank.memory.kind == memory.kind)

    @property
    def num_lookups(self) -> int:
        """Lookups of a forward pass."""
        return sum(len(family.lookups) for family in self.families)

    @property
    def num_backward_lookups(self) -> int:
        """Lookups that have a backward pass."""
        return sum(len(family.backward_lookups) for family in self.families)


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """The stages of a run, first to last."""
    layout = config.parallel
    part = TrainedPart.of(config.model, config.optimizer.trained)
    return _stages(part, layout.pipeline, layout.virtual_pipeline, layout.pipeline_layout)


@lru_cache(maxsize=256)
def _stages(part: TrainedPart, pipeline: int, virtual: int, layout: str | None) -> tuple[Stage, ...]:
    model = part.model
    chunks = model_chunks(model.num_layers, pipeline=pipeline, virtual_pipeline=virtual, layout=layout)
    return tuple(
        _stage(part, chunks_of_stage(chunks, pipeline=pipeline, pipeline_rank=rank)) for rank in range(pipeline)
    )


def _stage(part: TrainedPart, chunks: tuple[ModelChunk, ...]) -> Stage:
    model = part.model
    blocks = [block for chunk in chunks for block in chunk.layers]
    indices = [index for index, span in enumerate(model.memory_spans) if span.read in blocks]
    layers = [model.memory_layers[index] for index in indices]
    banks = {layer.view.bank for layer in layers}
    has_embedding, has_loss = (any(getattr(c, name) for c in chunks) for name in ("has_embedding", "has_loss"))
    branch = range(model.num_layers, model.num_layers + has_loss * model.num_branch_blocks)
    blocks += branch
    split, whole, experts = _blocks_weights(model, blocks)
    whole += len(branch) * (branch_projection(model) + branch_norms(model))
    embedding = padded_size(model.vocab_size or 0, model.vocab_size_multiple) * model.hidden_size
    # A tied output projection on a stage of its own is a copy.
    split += embedding * (1 if model.tied_embeddings and has_embedding else has_embedding + has_loss)
    costs = sum((_costs(model, layer) for layer in layers), LayerCosts())
    split += costs.split_by_heads
    whole += costs.retrieval + costs.projections - costs.split_by_heads
    families = tuple(_family(part, each, layers) for each in model.memories)
    families = tuple(family for family in families if family.layers)
    if any(family.memory.reads_once for family in families):
        families = tuple(_reading_once(part, family, chunks) for family in families)
        whole += shared_parameters(model)
    whole += has_loss * (last_norm(model) + end_weights(model))
    tables = sum(_elements(model, model.memory_plan.banks[bank]) for bank in banks)
    if part.is_whole:
        matrices = HiddenMatrices.of(model, _plans(model, blocks), costs, num_projections=len(branch), has_end=has_loss)
        trained = TrainedWeights(split, whole, tables, experts, matrices)
    else:
        trained = _trained_weights(part, blocks)
    backward = [block for block in blocks if block >= part.first_block]
    return Stage(
        chunks=chunks,
        blocks=_blocks(model, blocks),
        backward=_blocks(model, backward),
        trained_blocks=_blocks(model, [block for block in backward if part.trains({block})]),
        gradients_sent=sum(bool(chunk.layers) and 0 < chunk.layers[0] > part.first_block for chunk in chunks),
        split_weights=split,
        whole_weights=whole,
        table_elements=tables,
        expert_weights=experts,
        families=families,
        trained=trained,
        trained_banks=_trained_banks(part, chunks, indices),
        branch_blocks=len(branch),
        trains_all=part.is_whole,
    )


def _family(part: TrainedPart, memory: MemoryConfig, layers: Sequence[PlacedMemory]) -> FamilyInStage:
    """Memory layers of this family, among some of a stage."""
    own = [layer for layer in layers if layer.memory.kind == memory.kind]
    return FamilyInStage(
        own[0].memory if own else memory,
        sum((_costs(part.model, layer) for layer in own), LayerCosts()),
        len(own),
        sum(_elements(part.model, part.model.memory_plan.banks[bank]) for bank in {layer.view.bank for layer in own}),
        tuple(layer.view.num_bank_rows for layer in own),
        tuple(layer.view.num_bank_rows for layer in own if layer.span.read >= part.first_block),
        sum(layer.view.num_rows / max(1, layer.view.num_bank_rows) for layer in own) / max(1, len(own)),
    )


def _reading_once(part: TrainedPart, family: FamilyInStage, chunks: Sequence[ModelChunk]) -> FamilyInStage:
    """The family with a lookup of each chunk that has a layer of it, if its layers read together."""
    if not family.memory.reads_once:
        return family
    reading = {layer.span.read for layer in part.model.memory_layers if layer.memory.kind == family.memory.kind}
    lookups = family.lookups[: sum(bool(reading & set(chunk.layers)) for chunk in chunks)]
    # Token ids have no gradient: there is one of the table alone.
    return replace(family, lookups=lookups, backward_lookups=lookups if part.trains(reading, is_table=True) else ())


def _trained_banks(part: TrainedPart, chunks: Sequence[ModelChunk], layers: Sequence[int]) -> tuple[BankInStage, ...]:
    """The banks that these memory layers of a stage read, if their tables are trained."""
    model = part.model
    first_readers: dict[int, int] = {}
    for layer in layers:
        first_readers.setdefault(model.memory_plan.views[layer].bank, model.memory_spans[layer].read)
    found = []
    for bank, reader in first_readers.items():
        spec = model.memory_plan.banks[bank]
        if not part.trains(readers_of_bank(model, spec), is_table=True):
            continue
        chunk, blocks = next((n, chunk.layers) for n, chunk in enumerate(chunks) if reader in chunk.layers)
        memory = model.family_of_bank(bank)
        below = 0 if memory.reads_once else reader - blocks[0]
        found.append(BankInStage(memory, _elements(model, spec), chunk, below, spec.on_every_stage))
    return tuple(found)


def _blocks(model: ModelConfig, blocks: Sequence[int]) -> Blocks:
    split, _, experts = _blocks_weights(model, blocks)
    plans = _plans(model, blocks)
    return Blocks(
        num=len(blocks),
        norms=sum(num_norms(model, plan) for plan in plans),
        unprojected=sum(not plan.has_output_projection for plan in plans),
        ffns=sum(plan.has_ffn for plan in plans),
        split_weights=split,
        expert_weights=experts,
        memories=sum(len(plan.memories) for plan in plans),
        beside=sum(plan.is_beside_ffn for plan in plans) if reads_beside_ffn(model) else 0,
        split_latents=sum(plan.splits_latents for plan in plans),
        weights_used_twice=sum(projected_twice(model, plan) for plan in plans),
        arrivals=sum(any(span.read < block <= span.add for block in blocks) for span in model.memory_spans)
        + len({span.queried for span in model.memory_spans if span.queried is not None and span.read in blocks}),
    )


def _trained_weights(part: TrainedPart, blocks: Sequence[int]) -> TrainedWeights:
    """Trained weights of a stage with these blocks, in a model of which only some blocks are trained."""
    model = part.model
    trained = [block for block in blocks if part.trains({block})]
    split, whole, experts = _blocks_weights(model, trained)
    read = [(layer.span.read, layer) for layer in model.memory_layers]
    costs = sum((_costs(model, layer) for block, layer in read if block in trained), LayerCosts())
    split += costs.split_by_heads
    whole += costs.retrieval + costs.projections - costs.split_by_heads
    once = [block for block, layer in read if layer.memory.reads_once]
    if any(block in blocks for block in once) and part.trains(once):
        whole += shared_parameters(model)
    banks = {layer.view.bank for block, layer in read if block in blocks}
    tables = [model.memory_plan.banks[bank] for bank in banks]
    elements = sum(
        _elements(model, bank) for bank in tables if part.trains(readers_of_bank(model, bank), is_table=True)
    )
    matrices = HiddenMatrices.of(model, _plans(model, trained), costs)
    return TrainedWeights(split, whole, elements, experts, matrices)


def _blocks_weights(model: ModelConfig, blocks: Sequence[int]) -> tuple[int, int, int]:
    """Weights of blocks without their memories, see `_block_weights`."""
    split = whole = experts = 0
    for plan in _plans(model, blocks):
        of_block = _block_weights(model, plan)
        split, whole, experts = (a + b for a, b in zip((split, whole, experts), of_block, strict=True))
    return split, whole, experts


def _plans(model: ModelConfig, blocks: Sequence[int]) -> list[BlockPlan]:
    plans = plan_blocks(model)
    return [plans.get(block, PLAIN) for block in blocks]


def _elements(model: ModelConfig, bank: BankSpec) -> int:
    return bank.num_rows * model.family_of_bank(bank.index).row_width


def _costs(model: ModelConfig, layer: PlacedMemory) -> LayerCosts:
    return family_of(layer.memory).costs(layer.memory, layer.view, model)


def _block_weights(model: ModelConfig, block: BlockPlan) -> tuple[int, int, int]:
    """Weights of a block without its memory that tensor-parallel ranks split, that all hold, and of experts; see
    `count_parameters`."""
    width = model.hidden_size
    split = attention_weights(model, block) + attention_biases(model)
    whole = norm_weights(model, block) + site_weights(model)
    if not block.has_ffn:
        return split, whole, 0
    if model.moe is None:
        return split + 3 * width * model.ffn_hidden_size, whole, 0
    experts = model.moe.num_experts * 3 * width * model.moe.expert_ffn_hidden_size
    return split, whole + width * model.moe.num_experts, experts


@dataclass(frozen=True)
class Division:
    """Division of a run's ranks and tokens.

    Attributes:
        replicas: data-parallel size.
        stage_ranks: ranks of one stage.
        table_replicas: ranks of a stage that hold the same columns.
        num_microbatches: microbatches per step and data-parallel rank.
        table_microbatches: microbatches per update of tables and data-parallel rank.
        rank_tokens: tokens of a microbatch on one rank, between the blocks and in memories.
        loss_tokens: tokens of a microbatch whose losses one rank computes, for its part of the vocabulary.
    """

    replicas: int
    stage_ranks: int
    table_replicas: int
    num_microbatches: int
    table_microbatches: int
    rank_tokens: int
    loss_tokens: int

    @staticmethod
    def of(config: RunConfig, num_ranks: int) -> Division:
        layout, train = config.parallel, config.train
        replicas = num_ranks // (layout.tensor * layout.pipeline * layout.context)
        stage_ranks = num_ranks // layout.pipeline
        tokens = train.micro_batch_size * train.sequence_length
        num_microbatches = train.global_batch_size // (train.micro_batch_size * replicas)
        return Division(
            replicas=replicas,
            stage_ranks=stage_ranks,
            table_replicas=stage_ranks // layout.memory,
            num_microbatches=num_microbatches,
            table_microbatches=num_microbatches * config.optimizer.tables_every,
            rank_tokens=tokens // (layout.tensor * layout.context),
            loss_tokens=tokens // layout.context,
        )
