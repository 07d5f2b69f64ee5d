"""Public codes, and a layer's parameters under their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megamem.config.memory import MemoryConfig

if TYPE_CHECKING:
    # Torch takes seconds to load, and a configuration is read without it.
    from torch import Tensor

ULTRAMEMV2_RELEASE, META_RELEASE = "ultramemv2", "meta"
"""The releases: UltraMemV2's code (OLMo), which also has UltraMem and Memory+, and Meta's (lingua)."""


def _as_it_is(name: str, tensor: Tensor, memory: MemoryConfig) -> Tensor:
    return tensor


def _same_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


@dataclass(frozen=True)
class ReleasedNames:
    """A layer's parameters in a public code.

    Attributes:
        parameters: our names by the released ones.
        tables: our names of tables by the released ones.
        stacked: our names of parameters that the release numbers, `<released>.<number>`; stacked along a new first
            axis.
        unused: parameters that the release has and does not use.
        tables_in: owner of a table: one layer, or the whole model, with the layers' rows in order.
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


def _nothing() -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True)
class ReleasedPart:
    """Rows of a memory layer's parameter or buffer, as rows of a tensor in a module of a public code.

    Attributes:
        name: name of the tensor in the module.
        shape: shape of our rows.
        there: shape of theirs; None: the same.
        first: number of the tensor's row that theirs begin at.
        less: number that each element of the tensor is smaller by.
    """

    name: str
    shape: tuple[int, ...]
    there: tuple[int, ...] | None = None
    first: int = 0
    less: float = 0.0


@dataclass(frozen=True)
class ReleasedModule:
    """A memory layer with a bank of its own as a module of a public code, whose models are others around it.

    Attributes:
        names: the module's names, as models call it; the first one is written, below `model`.
        table: name of the table: `<table>.weight`, or `<table>.shard_<number>.weight` for parts of it in order.
        table_rows: rows of the table there, the first ones of ours.
        parts: parameters and buffers, by our name: their rows, in order.
        stated: integers that the code keeps, and that follow from the configuration here, by the name in the module.
        implied: makes buffers of ours, by our name, that the code has in no checkpoint, and raises ValueError where it cannot.
    """

    names: tuple[str, ...]
    table: str
    table_rows: int
    parts: Mapping[str, tuple[ReleasedPart, ...]]
    stated: Mapping[str, tuple[int, ...]]
    implied: Callable[[], Mapping[str, Tensor]] = _nothing
