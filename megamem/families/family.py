"""The record of a family of memories: all that the rest of the house knows of it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Generic, TypeVar

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.initialisation.distributions import Distribution
from megamem.layers.costs import LayerCosts
from megamem.placement.placed import PlacedMemory
from megamem.placement.sharing import LayerView
from megamem.releases.release import ReleasedModule, ReleasedNames

if TYPE_CHECKING:
    # Torch and Megatron take seconds to load, and a configuration is read without them.
    from megamem.layers.layer import MemoryLayer
    from megamem.layers.shared_read import SharedRead

C = TypeVar("C", bound=MemoryConfig)


def _none_shared(memory: MemoryConfig, *sizes: int) -> int:
    return 0


@dataclass(frozen=True)
class Family(Generic[C]):
    """One family. Its config itself says what needs the config alone: tables, rows, what can be observed.

    Attributes:
        config: its config, whose `kind` has the family's name as its default.
        layer_path: path of the class of its layers, `module:Class`, and not the class: torch and Megatron take seconds
            to load.
        costs: costs of one layer with this view in a model.
        distribution: distribution of a layer's parameter, given its own name; None for buffers, and for what the
            layer's `calibrate` sets.
        table_std: standard deviation of a bank's tables, given the root mean square of the sigma_s that its layers
            calibrated, or None where they calibrate nothing.
        released: the layer's names in public codes, by the code's name.
        released_module: a layer as a module of a public code, in a model of this config; it raises ValueError where no
            code has such layers. None: there is none.
        shared_read_path: path `module:Class` of what the layers of a chunk read together, if they do.
        shared_parameters: parameters of the shared read, in a model of this hidden size, besides the table.
        shared_kept: bytes per token that backward of that needs, besides its sums of rows, in a model of this hidden size
            with elements of so many bytes.
    """

    config: type[C]
    layer_path: str
    costs: Callable[[C, LayerView, ModelConfig], LayerCosts]
    distribution: Callable[[str, C, ModelConfig], Distribution | None]
    table_std: Callable[[C, ModelConfig, float | None], float]
    released: Mapping[str, ReleasedNames] = field(default_factory=dict)
    released_module: Callable[[PlacedMemory, ModelConfig], ReleasedModule] | None = None
    shared_read_path: str | None = None
    shared_parameters: Callable[[C, int], int] = _none_shared
    shared_kept: Callable[[C, int, int], int] = _none_shared

    @property
    def kind(self) -> str:
        """Value of `model.memory.kind` that stands for the family."""
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
