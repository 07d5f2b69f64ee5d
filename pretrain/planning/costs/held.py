"""The bytes that a rank holds from the first step to the last, by closed formulas."""

from __future__ import annotations

from dataclasses import dataclass

from megamem.config import ModelConfig
from megamem.memory_config import MemoryConfig
from pretrain.config.schema import RunConfig
from pretrain.config.updates import GRADIENT_BYTES, held_table_gradient_bytes
from pretrain.planning.costs.formulas import count_parameters
from pretrain.planning.costs.read_rows import has_read_rows, lies_in_files
from pretrain.planning.costs.stages import stages_of
from pretrain.planning.costs.state import dense_state, elements_of_tables, saved_by_matrices, table_state


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on a rank's device, the mean over pipeline stages; activations and buffers come on top.

    Attributes:
        model: weights and gradients of its part of the model.
        optimizer: its share of main weights and moments.
        files: of its parts of tables, and their state, in files.
    """

    model: float
    optimizer: float
    files: float = 0.0

    @property
    def total(self) -> float:
        return self.model + self.optimizer


def copied_elements(model: ModelConfig) -> int:
    """Table elements of which every pipeline stage holds a copy."""
    banks = (bank for bank in model.memory_plan.banks if bank.on_every_stage)
    return sum(bank.num_rows * model.family_of_bank(bank.index).row_width for bank in banks)


def _stepped_elements(config: RunConfig, memory: MemoryConfig, elements: int) -> float:
    """Trained ones of the elements of a family's tables."""
    if config.optimizer.trained_layers is None:
        return elements
    return sum(stage.trained_elements(memory) for stage in stages_of(config))


def held_bytes(config: RunConfig, num_ranks: int) -> HeldBytes:
    """Bytes that a rank of `num_ranks` holds; without `model.vocab_size` embeddings are not counted.

    Tables and experts are split over the G = `parallel.memory` ranks of a group, the rest over tensor parallelism, and
    all over the stages: (e + 4) ((dense / tensor + split / G) / pipeline), with e bytes per weight, and fewer than 4 of
    gradient for tables whose gradients are in bf16 or rows. The optimizer's
    state is split over all ranks (`pretrain.planning.costs.state` has its bytes per parameter). A bank
    of which every stage holds a copy is divided by the stages in neither. Weights that are not
    trained (`optimizer.trained_layers`) have neither gradients nor optimizer state.
    """
    counts, layout, train = count_parameters(config.model), config.parallel, config.train
    split = counts.tables + counts.experts
    copied = copied_elements(config.model)
    per_rank = ((counts.total - split) / layout.tensor + (split - copied) / layout.memory) / layout.pipeline
    per_rank += copied / layout.memory
    stepped, stepped_tables = counts.total - counts.tables, counts.tables + (layout.pipeline - 1) * copied
    with_gradients = per_rank
    if config.optimizer.trained_layers is not None:
        trained = [stage.trained for stage in stages_of(config)]
        dense = sum(each.split + each.whole for each in trained)
        tables, experts = (sum(getattr(each, name) for each in trained) for name in ("table_elements", "experts"))
        with_gradients = (dense / layout.tensor + (tables + experts) / layout.memory) / layout.pipeline
        stepped, stepped_tables = dense + experts, tables
    of_tables = held_table_gradient_bytes(config.optimizer)
    less = (GRADIENT_BYTES - of_tables) * stepped_tables / layout.memory / layout.pipeline
    state = stepped * dense_state(config) - saved_by_matrices(config)
    of_table_state = stepped_tables * table_state(config)
    files = 0.0
    for memory, elements in elements_of_tables(config.model):
        if lies_in_files(config, memory):
            # State is beside every row, whether or not it is trained.
            own_tables = elements / layout.memory / layout.pipeline
            per_rank -= own_tables
            files += own_tables * (train.element_bytes + table_state(config, memory))
            of_table_state -= _stepped_elements(config, memory, elements) * table_state(config, memory)
    # Replicas of tables whose gradients are rows have all of the state.
    if has_read_rows(config):
        of_table_state *= num_ranks / layout.pipeline / layout.memory
    if config.optimizer.value_offload == "none":
        state += of_table_state
    device = per_rank * train.element_bytes + with_gradients * GRADIENT_BYTES - less
    return HeldBytes(device, state / num_ranks, files)
