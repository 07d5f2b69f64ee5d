"""Bytes of state per weight, by what updates it (`pretrain.config.updates`): while a run trains, and in its checkpoints."""

from __future__ import annotations

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from pretrain.config.schema import RunConfig
from pretrain.config.updates import ADAMW, MAIN_WEIGHT_BYTES, matrix_update, table_update
from pretrain.planning.counts.matrices import num_elements
from pretrain.planning.counts.pipeline_stages import stages_of


def dense_state(config: RunConfig) -> float:
    """Bytes of optimizer state per weight of what is no table, main weights included; see `matrix_saving`."""
    return ADAMW.element_bytes(config.train.element_bytes)


def matrix_saving(config: RunConfig) -> int:
    """Bytes of optimizer state per weight of hidden matrices, fewer than of other weights that are no table."""
    return ADAMW.element_bytes(MAIN_WEIGHT_BYTES) - matrix_update(config.optimizer).element_bytes(MAIN_WEIGHT_BYTES)


def saved_by_matrices(config: RunConfig) -> float:
    """Bytes of optimizer state that the hidden matrices which are trained save over all stages, each counted once."""
    return matrix_saving(config) * sum(num_elements(stage.trained.matrices.all) for stage in stages_of(config))


def table_state(config: RunConfig, memory: MemoryConfig | None = None) -> float:
    """Bytes of optimizer state per element of tables, as each rank has it for its share.

    All ranks with columns of a row have the numbers that are kept per row.

    Args:
        memory: config of the family whose tables are meant; None: the mean over all.
    """
    return _table_state(config, config.train.element_bytes, copies=config.parallel.memory_columns, memory=memory)


def stored_dense(config: RunConfig) -> float:
    """Bytes of a checkpoint per weight of what is no table: fp32 main weights, moments, and a copy of the weights if it
    is asked for; see `matrix_saving`."""
    return MAIN_WEIGHT_BYTES + ADAMW.element_bytes(MAIN_WEIGHT_BYTES) + _copy_bytes(config)


def stored_table(config: RunConfig) -> float:
    """Bytes of a checkpoint per element of tables; weights stand for themselves where they have no main weights."""
    if table_update(config.optimizer).has_main_weights:
        main = MAIN_WEIGHT_BYTES
    else:
        main = config.train.element_bytes
    return main + _table_state(config, MAIN_WEIGHT_BYTES, copies=1) + _copy_bytes(config)


def elements_of_tables(model: ModelConfig) -> list[tuple[MemoryConfig, int]]:
    """Elements of the tables of each family."""
    return [
        (memory, sum(bank.num_rows for bank in model.banks_of(memory)) * memory.row_width) for memory in model.memories
    ]


def _table_state(config: RunConfig, weight_bytes: int, *, copies: int, memory: MemoryConfig | None = None) -> float:
    update = table_update(config.optimizer)
    return update.element_bytes(weight_bytes) + copies * update.row_bytes * _rows_per_element(config.model, memory)


def _rows_per_element(model: ModelConfig, memory: MemoryConfig | None) -> float:
    """Rows of all tables over their elements, of a family; None: of two families' tables the mean over the model."""
    if memory is not None or len(model.memories) < 2:
        return sum(len(each.tables) / each.row_width for each in (model.memories if memory is None else (memory,)))
    elements = elements_of_tables(model)
    rows = sum(num / each.row_width * len(each.tables) for each, num in elements)
    return rows / sum(num for _, num in elements)


def _copy_bytes(config: RunConfig) -> int:
    return config.train.element_bytes if config.checkpoint.weights_copy else 0
