"""Configurations of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from megamem.config.base import Config
from pretrain.config.loader import settle
from pretrain.config.source import Layer, from_plain

T = TypeVar("T", bound=Config)


def parse_config(mapping: Mapping[str, Any], cls: type[T], source: str = "the configuration") -> T:
    """A configuration from nested mappings, lists and scalars, as strictly as from a file that messages call `source`."""
    return settle(cls, from_plain(mapping, source, Layer.FILE))[0]
