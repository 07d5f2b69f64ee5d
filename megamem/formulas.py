"""Closed formulas for parameters, floating-point operations and table bytes of a model."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megamem.config import ModelConfig
from megamem.sharing import plan_sharing


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by part, over all layers and before any sharding.

    Attributes:
        embedding: input embedding and, if it is untied, output projection, with padded rows.
        attention: query, key, value and output projections.
        ffn: the SwiGLU's three matrices.
        norms: gains of the backbone's norms.
        retrieval: query projections, keys, gains and Tucker cores.
        memory_projections: value and pre-value projections.
        tables: values and pre-values of all banks.
        read_values: table elements that one token reads.
    """

    embedding: int
    attention: int
    ffn: int
    norms: int
    retrieval: int
    memory_projections: int
    tables: int
    read_values: int

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return sum(getattr(self, part.name) for part in fields(self)) - self.read_values

    @property
    def active(self) -> int:
        """Parameters that one token uses: everything but the tables, and the values that it reads."""
        return self.total - self.tables + self.read_values


def count_parameters(model: ModelConfig, padded_vocab_size: int) -> ParameterCounts:
    """Parameters of a model with an embedding of `padded_vocab_size` rows."""
    depth, width, head = model.num_layers, model.hidden_size, model.attention_head_dim
    memory = model.memory
    retrieval = projections = tables = read = 0
    if memory is not None:
        plan = plan_sharing(memory, depth)
        per_row = memory.value_dim + memory.pre_value_dim
        vectors = memory.num_queries * width + 2
        cores = memory.num_cores * memory.num_heads * memory.tucker_rank**2
        for view in plan.views:
            keys = 2 * memory.num_heads * view.num_keys * memory.tucker_rank
            retrieval += memory.key_dim * (vectors + keys) + cores
        projections = depth * width * per_row
        tables = sum(bank.num_rows for bank in plan.banks) * per_row
        read = depth * memory.num_heads * memory.top_k * per_row
    return ParameterCounts(
        embedding=(1 if model.tied_embeddings else 2) * padded_vocab_size * width,
        attention=depth * width * head * 2 * (model.num_attention_heads + model.query_groups),
        ffn=depth * 3 * width * model.ffn_hidden_size,
        norms=(2 * depth + 1) * width + (2 * depth * head if model.qk_norm else 0),
        retrieval=retrieval,
        memory_projections=projections,
        tables=tables,
        read_values=read,
    )


def forward_flops_per_token(model: ModelConfig, padded_vocab_size: int, sequence_length: int) -> float:
    """Floating-point operations of one token's forward pass, a multiply and an add counting as two.

    Matrix products, causal attention at its mean length, retrieval (key products, first-stage scores, the candidate grid) and gathers
    are counted; norms, activations and selections are not.
    """
    depth, width = model.num_layers, model.hidden_size
    counts = count_parameters(model, padded_vocab_size)
    flops = 2.0 * (counts.attention + counts.ffn + width * padded_vocab_size)
    flops += depth * 2 * 2 * model.num_attention_heads * model.attention_head_dim * (sequence_length + 1) / 2
    memory = model.memory
    if memory is not None:
        flops += 2.0 * (counts.memory_projections + depth * memory.num_queries * memory.key_dim * width)
        for view in plan_sharing(memory, depth).views:
            keys = 2 * memory.num_heads * view.num_keys * memory.tucker_rank
            grid = memory.num_heads * memory.row_top_k**2 * memory.tucker_rank
            flops += 2.0 * keys * (memory.key_dim + 1) + 2.0 * grid
        flops += 2.0 * counts.read_values
    return flops


def training_flops_per_token(model: ModelConfig, padded_vocab_size: int, sequence_length: int) -> float:
    """Forward and backward: three times the forward pass, without recomputation."""
    return 3.0 * forward_flops_per_token(model, padded_vocab_size, sequence_length)


def table_bytes_per_token(model: ModelConfig, bytes_per_element: int) -> int:
    """Bytes of values and pre-values that one token reads over all layers."""
    return count_parameters(model, 0).read_values * bytes_per_element
