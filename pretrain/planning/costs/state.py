"""Bytes of state per weight, by what updates it (`pretrain.config.updates`): while a run trains, and in its checkpoints."""

from __future__ import annotations

from megamem.config import ModelConfig
from pretrain.config.schema import RunConfig
from pretrain.config.updates import ADAMW, MAIN_WEIGHT_BYTES, matrix_update, table_update
from pretrain.planning.costs.matrices import num_elements
from pretrain.planning.costs.stages import stages_of


def dense_state(config: RunConfig) -> float:
    """Bytes of optimizer state per weight of what is no table, main weights included; see `matrix_saving`."""
    return ADAMW.element_bytes(config.train.element_bytes)


def matrix_saving(config: RunConfig) -> int:
    """Bytes of optimizer state per weight of hidden matrices, fewer than of other weights that are no table."""
    return ADAMW.element_bytes(MAIN_WEIGHT_BYTES) - matrix_update(config.optimizer).element_bytes(MAIN_WEIGHT_BYTES)


def saved_by_matrices(config: RunConfig) -> float:
    """Bytes of optimizer state that the hidden matrices which are trained save over all stages, each counted once."""
    return matrix_saving(config) * sum(num_elements(stage.trained.matrices.all) for stage in stages_of(config))


def table_state(config: RunConfig) -> float:
    """The same per element of tables, as each rank has it for its share.

    All ranks with columns of a row have the numbers that are kept per row.
    """
    return _table_state(config, config.train.element_bytes, copies=config.parallel.memory_columns)


def stored_dense(config: RunConfig) -> float:
    """Bytes of a checkpoint per weight of what is no table: fp32 main weights, moments, and a copy of the weights if it
    is asked for; see `matrix_saving`."""
    return MAIN_WEIGHT_BYTES + ADAMW.element_bytes(MAIN_WEIGHT_BYTES) + _copy_bytes(config)


def stored_table(config: RunConfig) -> float:
    """The same per element of tables, whose weights stand for themselves where they have no main weights."""
    if table_update(config.optimizer).has_main_weights:
        main = MAIN_WEIGHT_BYTES
    else:
        main = config.train.element_bytes
    return main + _table_state(config, MAIN_WEIGHT_BYTES, copies=1) + _copy_bytes(config)


def _table_state(config: RunConfig, weight_bytes: int, *, copies: int) -> float:
    update = table_update(config.optimizer)
    return update.element_bytes(weight_bytes) + copies * update.row_bytes * _rows_per_element(config.model)


def _rows_per_element(model: ModelConfig) -> float:
    """Rows of all tables over their elements; of two families' tables the mean over the model."""
    if len(model.memories) < 2:
        return sum(len(memory.tables) / memory.row_width for memory in model.memories)
    banks = [(bank.num_rows, model.family_of_bank(bank.index)) for bank in model.memory_plan.banks]
    rows = sum(num_rows * len(memory.tables) for num_rows, memory in banks)
    return rows / sum(num_rows * memory.row_width for num_rows, memory in banks)


def _copy_bytes(config: RunConfig) -> int:
    return config.train.element_bytes if config.checkpoint.weights_copy else 0
