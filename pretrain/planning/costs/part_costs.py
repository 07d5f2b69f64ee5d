"""Operations and bytes of the memory's parts in one optimizer step, by closed formulas, to compare times with.

Legend: T tokens per rank and step, L memory layers, H heads, N keys per side, R Tucker rank, K retrieved, V value dim,
P pre-value dim, e bytes per element of weights and activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pretrain.config.schema import RunConfig
from pretrain.config.updates import ROW_WISE, table_gradient_bytes, table_update
from pretrain.planning.costs.formulas import count_parameters, memory_layer_costs
from pretrain.planning.costs.traffic import exchanged_bytes


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


_ADAM_BYTES = 28
"""AdamW on fp32: weight, gradient and two moments are read, weight and moments are written."""
_PER_UPDATED_ROW = 190
"""Updates by row: what the operations move that make a row's factor. The dry run of a GPU counts the same."""


@dataclass(frozen=True)
class Cost:
    """Cost of a part, for one rank and step.

    Attributes:
        flops: floating-point operations; None where bytes are what counts.
        num_bytes: bytes that must move at the least; None where operations are what counts.
    """

    flops: float | None = None
    num_bytes: float | None = None


def table_step_bytes(config: RunConfig) -> float:
    """Bytes that an update of tables moves per element, on the device."""
    train = config.train
    if table_update(config.optimizer) is ROW_WISE:
        banks = [(bank.num_rows, config.model.family_of_bank(bank.index)) for bank in config.model.memory_plan.banks]
        num_rows = sum(rows * len(memory.tables) for rows, memory in banks) * config.parallel.memory_columns
        num_elements = sum(rows * memory.row_width for rows, memory in banks)
        # The gradient is read for the sums of squares and again, with the weights, which are written: as if all rows were.
        of_element = 2 * table_gradient_bytes(config.optimizer) + 2 * train.element_bytes
        return of_element + _PER_UPDATED_ROW * num_rows / max(1, num_elements)
    # Next to fp32 main weights there are those of the model in bf16.
    return _ADAM_BYTES + (train.element_bytes if train.precision == "bf16" else 0)


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
