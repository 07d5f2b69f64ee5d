"""Bytes that a rank holds from the first step to the last, by closed formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pretrain.config.schema import RunConfig
from pretrain.config.updates import GRADIENT_BYTES, held_table_gradient_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart
from pretrain.planning.bytes.row_bytes import has_read_rows, lies_in_files
from pretrain.planning.bytes.state import dense_state, matrix_saving, table_state
from pretrain.planning.bytes.weights import local_dense, local_tables, trained_dense, trained_tables
from pretrain.planning.counts.matrices import num_elements
from pretrain.planning.counts.pipeline_stages import Division, Stage, stages_of


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of a rank on its device, and in files; activations and buffers come on top.

    Attributes:
        model: weights and gradients of its part of the model.
        optimizer: its share of main weights and moments.
        files: parts of tables, and their state, in files.
    """

    model: float
    optimizer: float
    files: float = 0.0

    @property
    def total(self) -> float:
        return self.model + self.optimizer


def held_bytes(config: RunConfig, num_ranks: int) -> HeldBytes:
    """Bytes that a rank of the fullest of all stages holds on `num_ranks` ranks, and of that with the most in files.

    Without `model.vocab_size` embeddings are not counted.
    """
    division, stages = Division.of(config, num_ranks), stages_of(config)
    fullest = max((_on_device(config, stage, division) for stage in stages), key=lambda held: held.total)
    return replace(fullest, files=max(bytes_in_files(config, stage) for stage in stages))


def state_bytes(config: RunConfig, stage: Stage, division: Division) -> dict[MemoryPart, float]:
    """Bytes of a stage's state on one rank, by part.

    Tables and experts are split over the `parallel.memory` ranks of a group, other weights over tensor parallelism. Per
    weight: an element; where it is trained, also 4 of gradient, or a table's 2 or, in rows, none between steps; and
    optimizer state, split over replicas.
    """
    element = config.train.element_bytes
    dense, tables = local_dense(config, stage), local_tables(config, stage)
    dense_trained, tables_trained = trained_dense(config, stage), trained_tables(config, stage)
    matrices, layout = stage.trained.matrices, config.parallel
    of_matrices = num_elements(matrices.split) / layout.tensor + num_elements(matrices.whole)
    own, own_tables = dense_trained / (division.replicas * layout.context), tables_trained / division.table_replicas
    # The rank with the fullest share: as few matrices as ranges of the flattened weights can have.
    saved = matrix_saving(config) * max(0.0, own - (dense_trained - of_matrices))
    of_experts = num_elements(matrices.experts) / layout.memory
    saved_tables = matrix_saving(config) * max(0.0, own_tables - (tables_trained - of_experts))
    on_device = stage.trained.experts * dense_state(config) / division.table_replicas
    # Replicas of tables whose gradients are rows have all of the state.
    owners = 1 if has_read_rows(config) else division.table_replicas
    for family in stage.families:
        if lies_in_files(config, family.memory):
            tables -= family.table_elements / layout.memory
        elif config.optimizer.value_offload == "none":
            on_device += stage.trained_elements(family.memory) * table_state(config, family.memory) / owners
    experts = stage.trained.experts / layout.memory
    table_gradients = (tables_trained - experts) * held_table_gradient_bytes(config.optimizer)
    fixed = sum(len(family.lookups) * family.memory.fixed_bytes for family in stage.families)
    return {
        MemoryPart.WEIGHTS: dense * element + fixed,
        MemoryPart.TABLES: tables * element,
        MemoryPart.GRADIENTS: dense_trained * GRADIENT_BYTES,
        MemoryPart.TABLE_GRADIENTS: experts * GRADIENT_BYTES + table_gradients,
        MemoryPart.OPTIMIZER: own * dense_state(config) - saved,
        MemoryPart.TABLE_OPTIMIZER: on_device / layout.memory - saved_tables,
    }


def bytes_in_files(config: RunConfig, stage: Stage) -> float:
    """Bytes of a rank's parts of tables, and of their state, that lie in files."""
    # State is beside every row, whether or not it is trained.
    return sum(
        family.table_elements
        * (config.train.element_bytes + table_state(config, family.memory))
        / config.parallel.memory
        for family in stage.families
        if lies_in_files(config, family.memory)
    )


def _on_device(config: RunConfig, stage: Stage, division: Division) -> HeldBytes:
    state = state_bytes(config, stage, division)
    optimizer = state[MemoryPart.OPTIMIZER] + state[MemoryPart.TABLE_OPTIMIZER]
    return HeldBytes(sum(state.values()) - optimizer, optimizer)
