"""Differences between two configurations."""

from __future__ import annotations

from typing import Any

from pretrain.config.loader import to_dict
from pretrain.config.schema import RunConfig


def config_changes(before: RunConfig, now: RunConfig) -> dict[str, str]:
    """Differences between two configurations: "key: before -> now" by key."""
    old, new = flat(to_dict(before)), flat(to_dict(now))
    return {
        key: f"{key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by path, as in `train.num_steps`."""
    if isinstance(value, dict):
        return {key: leaf for name, part in value.items() for key, leaf in flat(part, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): value}
