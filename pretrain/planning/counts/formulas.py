"""Closed formulas for parameters, floating-point operations and table bytes of a model.

Those of a memory layer are its family's (`Family.costs`); those of tables and gathers follow from which tables it has
and how many rows it reads. A model that leaves `vocab_size` to the tokenizer is counted without embedding and output
projection; who knows the tokenizer sets it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.layers.costs import LayerCosts
from megamem.parameters.trained_part import ALL, Trained, TrainedPart
from megamem.placement.block_plan import PLAIN, plan_blocks, sum_over_blocks
from megamem.placement.placed import PlacedMemory
from megamem.placement.spans import count_memory_layers
from parallel.layout import padded_size
from pretrain.planning.counts.attention import attention_biases, attention_weights, norm_weights, projected_twice
from pretrain.planning.counts.branch import branch_norms, branch_projection
from pretrain.planning.counts.residual_streams import end_flops, end_weights, last_norm, site_flops, site_weights

# Fields of `ParameterCounts` that count a share of another field.
_SHARES = ("read_values", "experts", "idle_experts")
# Those that most models lack.
_OPTIONAL = ("residual_streams", "multi_token")


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by part, over all layers and before any sharding.

    Attributes:
        embedding: input embedding and, if it is untied, output projection, with padded rows.
        attention: query, key, value and output projections with their biases, or, with latents, their own.
        ffn: the SwiGLUs' three matrices, and the routers of mixtures of experts.
        norms: gains of the backbone's norms.
        residual_streams: sites of several streams, and their end.
        multi_token: the branch that predicts further tokens: blocks, projections and norms.
        retrieval: query projections, keys, gains and Tucker cores.
        memory_projections: value and pre-value projections, and gates.
        tables: values and pre-values of all banks.
        read_values: table elements that one token reads.
        experts: parameters of all experts.
        idle_experts: parameters of the experts that one token does not use.
    """

    embedding: int
    attention: int
    ffn: int
    norms: int
    residual_streams: int
    multi_token: int
    retrieval: int
    memory_projections: int
    tables: int
    read_values: int
    experts: int
    idle_experts: int

    @property
    def parts(self) -> dict[str, int]:
        """The parts that add up to the model, by name; several streams, and a branch for further tokens, where they are."""
        named = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in _SHARES}
        return {name: count for name, count in named.items() if name not in _OPTIONAL or count}

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return sum(self.parts.values())

    @property
    def active(self) -> int:
        """Parameters that one token uses: everything but tables and idle experts, and the values that it reads."""
        return self.total - self.tables - self.idle_experts + self.read_values

    @property
    def core(self) -> int:
        """Active parameters without embeddings and the values that are read: the matrices that every token passes."""
        return self.active - self.embedding - self.read_values


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Parameters of a model."""
    own, plan = memory_layer_costs(model), model.memory_plan
    ffn, experts, idle = _ffn_parameters(model)
    return ParameterCounts(
        embedding=(1 if model.tied_embeddings else 2) * _embedding_size(model),
        attention=_attention_products(model) + model.num_layers * attention_biases(model),
        ffn=ffn,
        norms=sum_over_blocks(model, partial(norm_weights, model)) + last_norm(model),
        residual_streams=model.num_layers * site_weights(model) + end_weights(model),
        multi_token=model.num_branch_blocks * (_plain_block(model) + branch_projection(model) + branch_norms(model)),
        retrieval=own.retrieval,
        memory_projections=own.projections + shared_parameters(model),
        tables=sum(bank.num_rows * model.family_of_bank(bank.index).row_width for bank in plan.banks),
        read_values=sum(_read_values(model, memory) for memory in model.memories),
        experts=experts,
        idle_experts=idle,
    )


def _read_values(model: ModelConfig, memory: MemoryConfig) -> int:
    """Table elements that one token reads in all layers of a family."""
    return memory.num_lookups(count_memory_layers(memory.placement, model.num_layers)) * _read_by_lookup(memory)


def _read_by_lookup(memory: MemoryConfig) -> int:
    return memory.lookup.rows * memory.row_width


def _plain_block(model: ModelConfig) -> int:
    """Weights of a block without a memory."""
    attention = attention_weights(model, PLAIN) + attention_biases(model)
    return attention + norm_weights(model, PLAIN) + 3 * model.hidden_size * model.ffn_hidden_size


def _attention_products(model: ModelConfig) -> int:
    """Weights of all projections of attention, whose biases cost no product."""
    return sum_over_blocks(model, partial(attention_weights, model))


def shared_parameters(model: ModelConfig) -> int:
    """Parameters of the read that all memory layers of a family share, besides the table."""
    memory = model.memory_read_once
    return 0 if memory is None else family_of(memory).shared_parameters(memory, model.hidden_size)


def _embedding_size(model: ModelConfig) -> int:
    return padded_size(model.vocab_size or 0, model.vocab_size_multiple) * model.hidden_size


def _ffn_parameters(model: ModelConfig) -> tuple[int, int, int]:
    """Parameters of all feed-forwards; of those, all experts'; of those, the ones that a token does not use."""
    depth = sum_over_blocks(model, lambda block: block.has_ffn)
    if model.moe is None:
        return depth * 3 * model.hidden_size * model.ffn_hidden_size, 0, 0
    expert = 3 * model.hidden_size * model.moe.expert_ffn_hidden_size
    router = model.hidden_size * model.moe.num_experts
    idle = (model.moe.num_experts - model.moe.top_k) * expert
    experts = model.moe.num_experts * expert
    return depth * (experts + router), depth * experts, depth * idle


def memory_layer_costs(model: ModelConfig) -> LayerCosts:
    """Costs of all memory layers, without their tables."""
    return sum((_layer_costs(model, layer) for layer in model.memory_layers), LayerCosts())


def _layer_costs(model: ModelConfig, layer: PlacedMemory) -> LayerCosts:
    return family_of(layer.memory).costs(layer.memory, layer.view, model)


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of one token's forward pass, a multiply and an add counting as two.

    Matrix products, causal attention at its mean length, retrieval (key products, first-stage scores, the candidate
    grid) and gathers are counted; norms, activations, biases and selections are not.
    """
    counts = count_parameters(model)
    attention = _attention_products(model) + sum_over_blocks(model, partial(projected_twice, model))
    flops = 2.0 * (attention + counts.ffn - counts.idle_experts + _embedding_size(model))
    num_blocks = model.num_layers + model.num_branch_blocks
    flops += model.num_layers * site_flops(model) + end_flops(model)
    return flops + branch_flops(model) + num_blocks * attended_flops(model, sequence_length) + memory_flops(model)


def branch_flops(model: ModelConfig) -> float:
    """The share of a branch that predicts further tokens, but for attention's scores and their products with values."""
    of_block = forward_flops_of_block(model, model.num_layers) if model.num_branch_blocks else 0.0
    return model.num_branch_blocks * (of_block + 2.0 * branch_projection(model) + 2.0 * _embedding_size(model))


def attended_flops(model: ModelConfig, sequence_length: int) -> float:
    """A block's scores of causal attention at its mean length, and their products with values, per token."""
    return 2 * 2 * model.num_attention_heads * model.attention_head_dim * (sequence_length + 1) / 2


def memory_flops(model: ModelConfig) -> float:
    """The memory's share of `forward_flops_per_token`: queries, projections, retrieval and gathers."""
    own = memory_layer_costs(model)
    return own.key_flops + own.selection_flops + own.projection_flops + 2.0 * count_parameters(model).read_values


def training_flops_per_token(model: ModelConfig, sequence_length: int, trained: Trained = ALL) -> float:
    """Forward and backward, without recomputation: three times the forward pass where all of the model is trained.

    Else (`optimizer.trained_layers`, `optimizer.trained_rows`) backward goes through the output projection, which is not trained, and down to the
    lowest block that something trained is in; a memory has the gradients of its block.
    """
    part, forward = TrainedPart.of(model, trained), forward_flops_per_token(model, sequence_length)
    if part.is_whole:
        return 3.0 * forward
    products = {block: forward_flops_of_block(model, block) for block in range(part.first_block, model.num_layers)}
    return forward + backward_flops(
        2.0 * _embedding_size(model) + end_flops(model) + branch_flops(model) + sum(products.values()),
        sum(flops for block, flops in products.items() if part.trains({block})),
        (len(products) + model.num_branch_blocks) * attended_flops(model, sequence_length),
    )


def backward_flops(products: float, trained_products: float, attended: float) -> float:
    """FLOPs of a backward pass, from those of the forward pass.

    Args:
        products: FLOPs of products with weights; the gradients of their inputs take as many again.
        trained_products: FLOPs of products with weights that are trained, whose gradients take as many again, too.
        attended: FLOPs of attention's scores and their products with values (`attended_flops`); both operands have
            gradients.
    """
    return products + trained_products + 2 * attended


def forward_flops_of_block(model: ModelConfig, block: int) -> float:
    """A block's share of `forward_flops_per_token`, but for attention's scores and their products with values.

    The read that the memories of all blocks share counts for the first of them.
    """
    width = model.hidden_size
    plan = plan_blocks(model).get(block, PLAIN)
    weights = attention_weights(model, plan) + projected_twice(model, plan)
    if plan.has_ffn:
        ffn = 3 * width * model.ffn_hidden_size
        if model.moe is not None:
            ffn = width * (model.moe.num_experts + 3 * model.moe.top_k * model.moe.expert_ffn_hidden_size)
        weights += ffn
    flops = 2.0 * weights + site_flops(model)
    for layer in (model.memory_layers[index] for index in plan.memories):
        own, memory = _layer_costs(model, layer), layer.memory
        flops += own.key_flops + own.selection_flops + own.projection_flops
        lookups = memory.num_lookups(layer.number + 1) - memory.num_lookups(layer.number)
        flops += 2.0 * lookups * _read_by_lookup(memory)
    return flops
