"""Parts of a step's seconds, and what lessens those of the memory."""

from __future__ import annotations

from enum import StrEnum


class TimePart(StrEnum):
    """A part of a step, in the order of a report. Those of the memory begin with its name."""

    MATMULS = "backbone: products of matrices"
    ATTENTION = "backbone: attention's core"
    ELEMENTWISE = "backbone: norms, activations, sums"
    LOSS = "output projection and loss"
    MEMORY_MATMULS = "memory: queries, keys, projections"
    MEMORY_SELECTION = "memory: selection and scores"
    MEMORY_GATHERS = "memory: gathers of rows"
    MEMORY_IDS = "memory: ids and coefficients"
    MEMORY_GRADIENTS = "memory: table gradients and their sort"
    MEMORY_EXCHANGE = "memory: exchange, exposed"
    LAUNCHES = "launches: their ends, and waits for the host"
    TENSOR = "tensor-parallel collectives"
    CONTEXT = "context-parallel collectives"
    EXPERTS = "tokens to experts and back"
    MESSAGES = "messages between stages"
    BUBBLE = "pipeline bubble"
    REDUCTION = "backbone: reductions and gathers, exposed"
    MEMORY_REDUCTION = "memory: reductions and gathers of tables, exposed"
    UPDATE = "backbone: zeroing, norms, update"
    MEMORY_UPDATE = "memory: zeroing, norms, update of tables"


REMEDIES = {
    TimePart.MEMORY_EXCHANGE: "a smaller parallel.memory inside one node, or fewer reads (top_k)",
    TimePart.MEMORY_GATHERS: "fewer or wider rows (top_k, value_dim), or a smaller parallel.memory, for wider columns",
    TimePart.MEMORY_IDS: "fewer reads (top_k)",
    TimePart.MEMORY_GRADIENTS: "fewer or wider rows (top_k, value_dim), or a smaller parallel.memory, for wider columns",
    TimePart.MEMORY_SELECTION: "fewer keys or a smaller row_top_k_limit",
    TimePart.MEMORY_MATMULS: "fewer memory layers or keys (sharing.group), or a smaller key_dim",
    TimePart.MEMORY_REDUCTION: "a larger parallel.memory, or more microbatches per step to hide it behind",
    TimePart.MEMORY_UPDATE: "a larger parallel.memory (zeroing), or more ranks",
}
