"""Common parameter names and layouts of the layers of one public code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from megamem.config.memory import MemoryConfig
from megamem.releases.release import ReleasedNames
from megamem.retrieval.config import ProductKeyConfig

if TYPE_CHECKING:
    from torch import Tensor

ULTRAMEMV2_TABLES = {"values_for_look_up": "values", "pre_values_for_look_up": "pre_values"}
META_QUERY = {
    "query_proj.query_mlps.0.weight": "query_proj",
    "query_proj.query_mlps.0.bias": "query_bias",
    "keys": "keys",
}
META_VALUES = {
    "value_proj.weight": "value_proj",
    "value_proj.bias": "value_bias",
    "gating.weight": "output_gate",
    "gating.bias": "output_gate_bias",
}


def tucker_names(
    extra: Mapping[str, str] | None = None, *, tables_in: Literal["layer", "model"] = "layer"
) -> ReleasedNames:
    """UltraMem and UltraMemV2 in the latter's public code, with what one of them has besides."""
    return ReleasedNames(
        parameters={
            "query_proj.weight": "query_proj",
            "query_norm.weight": "query_norm",
            "keys": "keys",
            "keys_norm.weight": "keys_norm",
            "values_proj.weight": "value_proj",
            "tucker_core_u": "u",
            "tucker_core_v": "v",
            "shuffle_index": "permutation",
            **(extra or {}),
        },
        tables=ULTRAMEMV2_TABLES,
        stacked={"tucker_core": "cores"},
        tables_in=tables_in,
        convert=_squeeze_singular_vectors,
        shape=_unsqueezed,
    )


def _squeeze_singular_vectors(name: str, tensor: Tensor, memory: MemoryConfig) -> Tensor:
    """u and v carry two dimensions of size 1 there."""
    return tensor.flatten(0, 1).squeeze(1) if name in ("u", "v") else tensor


def _unsqueezed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, shape[0], 1, shape[1]) if name in ("u", "v") else shape


def meta_names(parameters: Mapping[str, str], tables: Mapping[str, str]) -> ReleasedNames:
    """A product-key layer in Meta's public code."""
    return ReleasedNames(parameters, tables, convert=_unflatten_keys, shape=_flattened)


def _unflatten_keys(name: str, tensor: Tensor, memory: MemoryConfig) -> Tensor:
    """Keys are [2 H N, d] in Meta's release."""
    assert isinstance(memory, ProductKeyConfig)
    return tensor.view(memory.num_heads, 2, -1, memory.key_dim) if name == "keys" else tensor


def _flattened(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * shape[1] * shape[2], shape[3]) if name == "keys" else shape
