"""Closed formulas for parameters, floating-point operations and table bytes of a model.

Those of a memory layer are its family's (`Family.costs`); those of tables and gathers follow from which tables it has
and how many rows it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megamem.config import ModelConfig
from megamem.families.family import LayerCosts
from megamem.families.registry import family_of

# Fields of `ParameterCounts` that count a share of another field.
_SHARES = ("read_values", "idle_experts")


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by part, over all layers and before any sharding.

    Attributes:
        embedding: input embedding and, if it is untied, output projection, with padded rows.
        attention: query, key, value and output projections.
        ffn: the SwiGLUs' three matrices, and the routers of mixtures of experts.
        norms: gains of the backbone's norms.
        retrieval: query projections, keys, gains and Tucker cores.
        memory_projections: value and pre-value projections, and gates.
        tables: values and pre-values of all banks.
        read_values: table elements that one token reads.
        idle_experts: parameters of the experts that one token does not use.
    """

    embedding: int
    attention: int
    ffn: int
    norms: int
    retrieval: int
    memory_projections: int
    tables: int
    read_values: int
    idle_experts: int

    @property
    def parts(self) -> dict[str, int]:
        """The parts that add up to the model, by name."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name not in _SHARES}

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


def count_parameters(model: ModelConfig, padded_vocab_size: int) -> ParameterCounts:
    """Parameters of a model with an embedding of `padded_vocab_size` rows."""
    depth, width, head = model.num_layers, model.hidden_size, model.attention_head_dim
    memory, own = model.memory, memory_layer_costs(model)
    per_row = memory.row_width if memory is not None else 0
    reads = model.num_memory_layers * memory.lookup.rows if memory is not None else 0
    ffn, idle = _ffn_parameters(model)
    return ParameterCounts(
        embedding=(1 if model.tied_embeddings else 2) * padded_vocab_size * width,
        attention=depth * width * head * 2 * (model.num_attention_heads + model.query_groups),
        ffn=ffn,
        norms=(2 * depth + 1) * width + (2 * depth * head if model.qk_norm else 0),
        retrieval=own.retrieval,
        memory_projections=own.projections,
        tables=sum(bank.num_rows for bank in model.memory_plan.banks) * per_row,
        read_values=reads * per_row,
        idle_experts=idle,
    )


def _ffn_parameters(model: ModelConfig) -> tuple[int, int]:
    """Parameters of all feed-forwards, and of those the ones that a token does not use."""
    replaced = model.memory is not None and model.memory.placement.position == "instead"
    depth = model.num_layers - (model.num_memory_layers if replaced else 0)
    if model.moe is None:
        return depth * 3 * model.hidden_size * model.ffn_hidden_size, 0
    expert = 3 * model.hidden_size * model.moe.expert_ffn_hidden_size
    router = model.hidden_size * model.moe.num_experts
    idle = (model.moe.num_experts - model.moe.top_k) * expert
    return depth * (model.moe.num_experts * expert + router), depth * idle


def memory_layer_costs(model: ModelConfig) -> LayerCosts:
    """What all memory layers cost by themselves, without their tables."""
    if model.memory is None:
        return LayerCosts()
    costs = family_of(model.memory).costs
    return sum((costs(model.memory, view, model.hidden_size) for view in model.memory_plan.views), LayerCosts())


def forward_flops_per_token(model: ModelConfig, padded_vocab_size: int, sequence_length: int) -> float:
    """Floating-point operations of one token's forward pass, a multiply and an add counting as two.

    Matrix products, causal attention at its mean length, retrieval (key products, first-stage scores, the candidate
    grid) and gathers are counted; norms, activations, biases and selections are not.
    """
    depth, width = model.num_layers, model.hidden_size
    counts = count_parameters(model, padded_vocab_size)
    flops = 2.0 * (counts.attention + counts.ffn - counts.idle_experts + width * padded_vocab_size)
    flops += depth * 2 * 2 * model.num_attention_heads * model.attention_head_dim * (sequence_length + 1) / 2
    return flops + memory_flops_per_token(model)


@dataclass(frozen=True)
class MemoryFlops:
    """Floating-point operations of the memory in one token's forward pass, over all layers.

    Attributes:
        keys: query projections, and their products with the keys.
        selection: first-stage scores and the candidate grid, M^2 products of R terms each behind the cores, or M^2
            sums.
        projections: of values, pre-values and gates.
        gather_dot: products of the pre-values.
        gather_sum: sums of the values.
    """

    keys: float
    selection: float
    projections: float
    gather_dot: float
    gather_sum: float

    @property
    def total(self) -> float:
        """All five."""
        return self.keys + self.selection + self.projections + self.gather_dot + self.gather_sum


def memory_flops_per_token(model: ModelConfig) -> float:
    """The memory's share of `forward_flops_per_token`: queries, projections, retrieval and gathers."""
    return memory_flops(model).total


def memory_flops(model: ModelConfig) -> MemoryFlops:
    """The same by part."""
    memory, own = model.memory, memory_layer_costs(model)
    reads = model.num_memory_layers * memory.lookup.rows if memory is not None else 0
    pre_width = memory.width("pre_values") if memory is not None else 0
    summed_width = memory.row_width - pre_width if memory is not None else 0
    return MemoryFlops(
        keys=own.key_flops,
        selection=own.selection_flops,
        projections=own.projection_flops,
        gather_dot=2.0 * reads * pre_width,
        gather_sum=2.0 * reads * summed_width,
    )


def training_flops_per_token(model: ModelConfig, padded_vocab_size: int, sequence_length: int) -> float:
    """Forward and backward: three times the forward pass, without recomputation."""
    return 3.0 * forward_flops_per_token(model, padded_vocab_size, sequence_length)


def table_bytes_per_token(model: ModelConfig, bytes_per_element: int) -> int:
    """Bytes of values and pre-values that one token reads over all layers."""
    return count_parameters(model, 0).read_values * bytes_per_element
