"""State that each way of updating a parameter keeps: its tensors, their bytes, their names in checkpoints; and operations
of an update that takes many.

The optimizer makes its state and shares its work by them, the planner counts by them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # It imports torch, and code that plans or checks does not.
    from megamem.parameters.declaration import GroupName
    from pretrain.config.optimizer import OptimizerConfig

STATE_PREFIX = "optimizer.state."
"""Checkpoints have what an update keeps as `optimizer.state.<name>.<parameter>`, main weights as `param`."""

MAIN_WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
"""Per element of a gradient, but for those of tables that are in bf16 or rows."""
_STATE_BYTES = 4


@dataclass(frozen=True)
class Update:
    """An update of parameters, by the state that it keeps beside their weights.

    Attributes:
        name: name for people.
        per_element: fp32 tensors in the parameter's shape.
        per_row: fp32 tensors with a number per row of the parameter.
        has_main_weights: weights of fewer bits have fp32 main weights, which are rounded to them. Without them the
            weights are what is updated.
    """

    name: str
    per_element: tuple[str, ...] = ()
    per_row: tuple[str, ...] = ()
    has_main_weights: bool = True

    def element_bytes(self, weight_bytes: int) -> int:
        """Bytes of state per element of a parameter whose weights take `weight_bytes`, without what is kept per row.

        In fp32 the weights are their own main weights.
        """
        main = MAIN_WEIGHT_BYTES if self.has_main_weights and weight_bytes < MAIN_WEIGHT_BYTES else 0
        return main + _STATE_BYTES * len(self.per_element)

    @property
    def row_bytes(self) -> int:
        """Bytes of state per row."""
        return _STATE_BYTES * len(self.per_row)


ADAMW = Update("adamw", per_element=("exp_avg", "exp_avg_sq"))
"""Megatron's distributed optimizer over PyTorch's AdamW."""

ROW_WISE = Update("row_wise", per_row=("row_exp_avg_sq", "row_last_update"), has_main_weights=False)
"""AdamW's update of tables by a second moment per row, on the weights themselves (`pretrain.engine.tables.row_wise`). The moment
is as of the last update in which the row was read; in fp32 the number of that is exact up to 2^24."""

SCALE = "scale"
"""Name of a table's scale among what updates keep (`kernels.common.table_scale`): its weights are that times its `param`."""

MUON = Update("muon", per_element=("momentum",))
"""The update of hidden matrices by orthogonalised momentum (`pretrain.engine.muon`)."""

MATRIX_GROUPS: tuple[GroupName, ...] = ("backbone", "retrieval", "experts")
"""Groups that have hidden matrices."""
TABLE_GROUPS: tuple[GroupName, ...] = ("values", "pre_values")
"""Groups of memory tables."""


def table_update(settings: OptimizerConfig) -> Update:
    """The update of the memory tables."""
    return ROW_WISE if settings.tables == "row_wise" else ADAMW


def keeps_rows(settings: OptimizerConfig) -> bool:
    """True if gradients of tables are the rows that a step read; what `auto` takes has been settled
    (`pretrain.config.table_gradients`)."""
    assert settings.tables != "row_wise" or settings.table_gradients != "auto"
    return settings.tables == "row_wise" and settings.table_gradients == "rows"


def has_bf16_gradients(settings: OptimizerConfig) -> bool:
    """True if gradients of tables are dense and in bf16."""
    return (
        settings.tables == "row_wise"
        and settings.table_gradients == "dense"
        and settings.table_gradient_dtype == "bf16"
    )


def table_gradient_bytes(settings: OptimizerConfig) -> int:
    """Bytes per element of a gradient in a table's shape."""
    return 2 if has_bf16_gradients(settings) else GRADIENT_BYTES


def held_table_gradient_bytes(settings: OptimizerConfig) -> int:
    """Bytes of gradient per element of a table, between steps: gradients of rows come and go."""
    return 0 if keeps_rows(settings) else table_gradient_bytes(settings)


def keeps_files(settings: OptimizerConfig) -> bool:
    """True if tables whose rows are known before a step lie in files, and a step's rows of them are on the device."""
    return keeps_rows(settings) and settings.table_folder is not None


def matrix_update(settings: OptimizerConfig) -> Update:
    """The update of the hidden matrices."""
    return MUON if settings.matrices == "muon" else ADAMW


def orthogonalisation_flops(shapes: Sequence[tuple[int, int]], settings: OptimizerConfig) -> list[float]:
    """Operations of an update of each matrix, per Newton-Schulz step 4 m^2 n + 2 m^3 with m <= n."""
    sides = (sorted(shape) for shape in shapes)
    return [settings.muon_ns_steps * (4.0 * m**2 * n + 2.0 * m**3) for m, n in sides]
