"""Operations and bytes of the memory's parts in one optimizer step, by closed formulas, to compare times with.

Legend: T tokens per rank and step, L memory layers, H heads, N keys per side, R Tucker rank, K retrieved, V value dim,
P pre-value dim, e bytes per element of weights and activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lab.bench.mean_traffic import exchanged_bytes
from pretrain.config.schema import RunConfig
from pretrain.config.updates import table_gradient_bytes
from pretrain.planning.counts.formulas import count_parameters, memory_layer_costs
from pretrain.planning.seconds.update_seconds import table_step_bytes


class Part(StrEnum):
    """A part of the memory, in the order of a report."""

    KEYS = "queries and key scores"
    SELECTION = "selection"
    SCORES = "scores of the selected"
    ROWS = "row ids"
    GATHER_DOT = "gather_dot"
    GATHER_SUM = "gather_sum"
    WEIGHTING = "weighting"
    EXCHANGE = "exchange"
    TABLE_GRADIENT = "table gradient"
    PROJECTIONS = "projections"
    OTHER = "other"
    SINGULAR_VECTORS = "singular vectors"
    ZEROING = "zeroing of table gradients"
    TABLE_REDUCTION = "reduction of table gradients"
    TABLE_STEP = "optimizer step of tables"


@dataclass(frozen=True)
class Cost:
    """Cost of a part, for one rank and step.

    Attributes:
        flops: floating-point operations; None where bytes are what counts.
        num_bytes: bytes that must move at the least; None where operations are what counts.
    """

    flops: float | None = None
    num_bytes: float | None = None


def part_costs(config: RunConfig, num_ranks: int) -> dict[Part, Cost]:
    """The costs of those parts of the memory that have a formula, as the mean over pipeline stages.

    Backward of a matrix product costs twice its forward; that of a gather reads the same rows again for the gradient of
    its operand, and reads and writes rows of the table's gradient. Recomputation (`train.recompute: full`) repeats
    forward. Tokens x layers and the optimizer state of tables are split evenly over all ranks.
    """
    model, train = config.model, config.train
    forwards = 2 if train.recompute == "full" else 1
    tokens, element = train.tokens_per_step / num_ranks, train.element_bytes
    layer_costs, tables = memory_layer_costs(model), count_parameters(model).tables
    gradient = table_gradient_bytes(config.optimizer)
    # Elements of tables that are read.
    all_read = of_pre_values = 0.0
    for layer in model.memory_layers:
        reads = tokens * layer.memory.lookup.rows
        all_read += reads * layer.memory.row_width
        of_pre_values += reads * layer.memory.width("pre_values")
    costs = {
        Part.KEYS: Cost(flops=(forwards + 2) * tokens * layer_costs.key_flops),
        Part.PROJECTIONS: Cost(flops=(forwards + 2) * tokens * layer_costs.projection_flops),
        Part.SELECTION: Cost(num_bytes=forwards * tokens * layer_costs.selection_bytes),
        Part.GATHER_DOT: Cost(num_bytes=(forwards + 1) * of_pre_values * element),
        Part.GATHER_SUM: Cost(num_bytes=(forwards + 1) * (all_read - of_pre_values) * element),
        Part.TABLE_GRADIENT: Cost(num_bytes=2 * gradient * all_read),
        Part.EXCHANGE: Cost(num_bytes=exchanged_bytes(config, num_ranks)),
        Part.ZEROING: Cost(num_bytes=gradient * tables / (config.parallel.pipeline * config.parallel.memory)),
    }
    if config.optimizer.value_offload == "none" and model.moe is None:
        costs[Part.TABLE_STEP] = Cost(num_bytes=table_step_bytes(config) * tables / num_ranks)
    return {part: cost for part, cost in costs.items() if cost.flops or cost.num_bytes}
