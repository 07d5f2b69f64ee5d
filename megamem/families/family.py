"""The record of a family of memories: all that the rest of the house knows of it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from megamem.config import ModelConfig
from megamem.distributions import Distribution
from megamem.memory_config import MemoryConfig
from megamem.sharing import LayerView

if TYPE_CHECKING:
    # Torch and Megatron take seconds to load, and a configuration is read without them.
    from torch import Tensor

    from megamem.layers.layer import MemoryLayer
    from megamem.layers.shared_read import SharedRead

C = TypeVar("C", bound=MemoryConfig)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer besides its tables, whose costs follow from `MemoryConfig.tables` and `lookup`.

    Attributes:
        retrieval: parameters of query projections, keys, gains and cores.
        projections: parameters between a token's hidden state and its values, in both directions.
        key_flops: operations per token of query projections, and of their products with the keys.
        selection_flops: of first-stage scores and the candidate grid.
        projection_flops: of the projections.
        selection_bytes: bytes per token that the selection reads and writes.
        kept_wide: fp32 elements per token that backward needs of a forward pass, lookups left to `traffic`.
        kept_narrow: the same in the precision of the run.
        kept_ids: the same of int64 numbers.
        kept_keys: elements of keys that are normalised, once per forward pass.
        select_wide: fp32 elements per token that the selection of entries has at a time, scores among them.
        kept_by_entries: bytes per token, of what is kept, that are gone when backward has the gradients of scores.
        backward_wide: fp32 elements per token that exist at a time in backward, besides what was kept.
        split_by_heads: of the parameters, those that tensor-parallel ranks split with attention's heads.
    """

    retrieval: int = 0
    projections: int = 0
    key_flops: float = 0.0
    selection_flops: float = 0.0
    projection_flops: float = 0.0
    selection_bytes: int = 0
    kept_wide: int = 0
    kept_narrow: int = 0
    kept_ids: int = 0
    kept_keys: int = 0
    select_wide: int = 0
    kept_by_entries: int = 0
    backward_wide: int = 0
    split_by_heads: int = 0

    def __add__(self, other: LayerCosts) -> LayerCosts:
        return LayerCosts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def _as_it_is(name: str, tensor: Tensor, memory: MemoryConfig) -> Tensor:
    return tensor


def _none_shared(memory: MemoryConfig, hidden_size: int) -> int:
    return 0


def _same_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


@dataclass(frozen=True)
class ReleasedNames:
    """A layer's parameters in a public code.

    Attributes:
        parameters: our names by the released ones.
        tables: the same of the tables.
        stacked: our names of parameters that the release numbers, `<released>.<number>`; stacked along a new first
            axis.
        unused: parameters that the release has and does not use.
        tables_in: whether a table is that of one layer, or one for the whole model, with the layers' rows in order.
        convert: a released tensor in our layout, given our name for it and the layer's config. The elements keep their
            order.
        shape: the released shape of a parameter, given our name for it and our shape.
    """

    parameters: Mapping[str, str]
    tables: Mapping[str, str]
    stacked: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    tables_in: Literal["layer", "model"] = "layer"
    convert: Callable[[str, Tensor, MemoryConfig], Tensor] = _as_it_is
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = _same_shape


@dataclass(frozen=True)
class Family(Generic[C]):
    """One family. Its config itself says what needs the config alone: tables, rows, what can be observed.

    Attributes:
        config: its config, whose `kind` has the family's name as its default.
        layer_path: of the class of its layers, `module:Class`; a path, because torch and Megatron take seconds to load.
        costs: of one layer with this view in a model of this hidden size.
        distribution: that a layer's parameter is drawn from, given its own name; None for buffers, and for what the
            layer's `calibrate` sets.
        table_std: standard deviation of a bank's tables, given the root mean square of the sigma_s that its layers
            calibrated, or None where they calibrate nothing.
        released: the layer's names in public codes, by the code's name.
        shared_read_path: as `layer_path`, of what the layers of a chunk read together, if they do.
        shared_parameters: of that, in a model of this hidden size, besides the table.
        shared_kept_wide: fp32 elements per token that backward of that needs, besides its sums of rows.
    """

    config: type[C]
    layer_path: str
    costs: Callable[[C, LayerView, int], LayerCosts]
    distribution: Callable[[str, C, ModelConfig], Distribution | None]
    table_std: Callable[[C, ModelConfig, float | None], float]
    released: Mapping[str, ReleasedNames] = field(default_factory=dict)
    shared_read_path: str | None = None
    shared_parameters: Callable[[C, int], int] = _none_shared
    shared_kept_wide: Callable[[C, int], int] = _none_shared

    @property
    def kind(self) -> str:
        """Its value of `model.memory.kind`."""
        (kind,) = (each.default for each in fields(self.config) if each.name == "kind")
        assert isinstance(kind, str)
        return kind

    def layer(self) -> type[MemoryLayer]:
        """The class of its layers."""
        found: type[MemoryLayer] = pkgutil.resolve_name(self.layer_path)
        return found

    def shared_read(self) -> type[SharedRead] | None:
        """The class of what its layers read together, if they do."""
        if self.shared_read_path is None:
            return None
        found: type[SharedRead] = pkgutil.resolve_name(self.shared_read_path)
        return found


ULTRAMEMV2_RELEASE, META_RELEASE = "ultramemv2", "meta"
"""The releases: UltraMemV2's code (OLMo), which also has UltraMem and Memory+, and Meta's (lingua)."""
