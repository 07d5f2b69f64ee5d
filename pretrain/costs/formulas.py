"""Closed formulas for parameters, floating-point operations and table bytes of a model.

Legend: D hidden size, L memory layers, H heads, N keys per side, d key dim, R Tucker rank, C cores, K retrieved, V value dim,
P pre-value dim, B virtual blocks with a projection each, M rows (and columns) kept by the first selection stage, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megamem.config import MemoryConfig, ModelConfig
from megamem.sharing import LayerView, plan_sharing

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
        """Active parameters without embeddings and without the values that are read: the matrices that every token passes."""
        return self.active - self.embedding - self.read_values


def count_parameters(model: ModelConfig, padded_vocab_size: int) -> ParameterCounts:
    """Parameters of a model with an embedding of `padded_vocab_size` rows."""
    depth, width, head = model.num_layers, model.hidden_size, model.attention_head_dim
    memory, num_memory_layers = model.memory, model.num_memory_layers
    retrieval = projections = tables = read = 0
    if memory is not None:
        plan = plan_sharing(memory, num_memory_layers)
        per_row = memory.value_dim + memory.pre_dim
        retrieval = sum(_retrieval_parameters(memory, width, view) for view in plan.views)
        projections = num_memory_layers * _projection_parameters(memory, width)
        tables = sum(bank.num_rows for bank in plan.banks) * per_row
        read = num_memory_layers * memory.num_heads * memory.top_k * per_row
    ffn, idle = _ffn_parameters(model)
    return ParameterCounts(
        embedding=(1 if model.tied_embeddings else 2) * padded_vocab_size * width,
        attention=depth * width * head * 2 * (model.num_attention_heads + model.query_groups),
        ffn=ffn,
        norms=(2 * depth + 1) * width + (2 * depth * head if model.qk_norm else 0),
        retrieval=retrieval,
        memory_projections=projections,
        tables=tables,
        read_values=read,
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


def _num_keys(memory: MemoryConfig, view: LayerView) -> int:
    """Key vectors of one layer: 2 H N, and R times as many with Tucker cores."""
    vectors = 2 * memory.num_heads * memory.expansion * view.num_keys
    return vectors * memory.tucker_rank if memory.has_tucker_cores else vectors


def _retrieval_parameters(memory: MemoryConfig, width: int, view: LayerView) -> int:
    queries, keys = memory.num_queries * memory.key_dim, _num_keys(memory, view) * memory.key_dim
    if memory.has_tucker_cores:
        return queries * width + keys + 2 * memory.key_dim + memory.num_cores * memory.num_heads * memory.tucker_rank**2
    gain = memory.key_dim if memory.query_norm else 0
    return queries * width + keys + gain + (queries if memory.biases else 0)


def _projection_parameters(memory: MemoryConfig, width: int) -> int:
    """Weights and biases between a token's hidden state and its values, in both directions."""
    return _projection_weights(memory, width) + (_projection_biases(memory, width) if memory.biases else 0)


def _projection_weights(memory: MemoryConfig, width: int) -> int:
    columns = memory.num_value_blocks * memory.value_dim if memory.has_value_projection else 0
    # PEER's pre-values meet the hidden state itself.
    columns += memory.pre_dim if memory.kind == "ultramem_v2" else 0
    columns += memory.value_dim if memory.kind == "memory_plus" else 0
    return width * (columns + (1 if memory.has_output_gate else 0))


def _projection_biases(memory: MemoryConfig, width: int) -> int:
    biases = width if memory.has_value_projection else 0
    biases += memory.value_dim if memory.kind == "memory_plus" else 0
    return biases + (1 if memory.has_output_gate else 0)


def forward_flops_per_token(model: ModelConfig, padded_vocab_size: int, sequence_length: int) -> float:
    """Floating-point operations of one token's forward pass, a multiply and an add counting as two.

    Matrix products, causal attention at its mean length, retrieval (key products, first-stage scores, the candidate grid) and gathers
    are counted; norms, activations, biases and selections are not.
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
        selection: first-stage scores and the candidate grid, M^2 products of R terms each behind the cores, or M^2 sums.
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
    return 0.0 if model.memory is None else memory_flops(model.memory, model).total


def memory_flops(memory: MemoryConfig, model: ModelConfig) -> MemoryFlops:
    """The same by part."""
    num_layers = model.num_memory_layers
    views = plan_sharing(memory, num_layers).views
    keys = sum(_num_keys(memory, view) for view in views)
    queries = num_layers * memory.num_queries * memory.key_dim * model.hidden_size
    candidates = num_layers * memory.num_heads * memory.row_top_k**2
    reads = num_layers * memory.num_heads * memory.top_k
    return MemoryFlops(
        keys=2.0 * (queries + keys * memory.key_dim),
        selection=2.0 * (keys + candidates * memory.tucker_rank) if memory.has_tucker_cores else 1.0 * candidates,
        projections=2.0 * num_layers * _projection_weights(memory, model.hidden_size),
        gather_dot=2.0 * reads * memory.pre_dim,
        gather_sum=2.0 * reads * memory.value_dim,
    )


def key_scores_per_token(memory: MemoryConfig, num_memory_layers: int) -> int:
    """Scores of single keys that the selections of all layers look at: 2 H N per layer, and R times as many with Tucker cores."""
    return sum(_num_keys(memory, view) for view in plan_sharing(memory, num_memory_layers).views)


def training_flops_per_token(model: ModelConfig, padded_vocab_size: int, sequence_length: int) -> float:
    """Forward and backward: three times the forward pass, without recomputation."""
    return 3.0 * forward_flops_per_token(model, padded_vocab_size, sequence_length)


def table_bytes_per_token(model: ModelConfig, bytes_per_element: int) -> int:
    """Bytes of values and pre-values that one token reads over all layers."""
    return count_parameters(model, 0).read_values * bytes_per_element
