"""Tensors that an operation of PyTorch reads and writes, by its schema."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pretrain.planning.dryrun.operations import tensors_in

# They look at the shape of their argument alone.
_LIKE = re.compile(r"aten::(new_.*|.*_like)$")
# A view, of which the schema does not say so.
_VIEW = "aten::_unsafe_view"


def has_bytes(value: Any) -> bool:
    """True of tensors with elements in a storage."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0


def storage_of(tensor: Tensor) -> int:
    """A storage's number: two tensors of one have the same."""
    return tensor.untyped_storage()._cdata


def accesses(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operation reads, and those that it writes."""
    ways, is_new = _ways(func)
    touched: dict[str, list[Tensor]] = {"read": [], "write": [], "shape": []}
    named = [*zip((argument.name for argument in func._schema.arguments), args, strict=False), *kwargs.items()]
    for name, value in named:
        touched[ways[name]] += filter(has_bytes, tensors_in(value))
    results = out if isinstance(out, tuple) and len(is_new) > 1 else (out,)
    for result, new in zip(results, is_new, strict=False):
        if new:
            touched["write"] += filter(has_bytes, tensors_in(result))
    return touched["read"], touched["write"]


@cache
def _ways(func: Any) -> tuple[dict[str, str], tuple[bool, ...]]:
    """A schema's word on each argument, "read", "write" or "shape", and whether each result is new memory."""
    schema = func._schema
    is_view = schema.name == _VIEW
    only_shapes = is_view or bool(_LIKE.match(schema.name))
    ways = {}
    for argument in schema.arguments:
        if argument.alias_info is not None:
            ways[argument.name] = "write" if argument.alias_info.is_write else "shape"
        else:
            ways[argument.name] = "shape" if only_shapes else "read"
    return ways, tuple(result.alias_info is None and not is_view for result in schema.returns)
