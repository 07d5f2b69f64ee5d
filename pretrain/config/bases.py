"""Files that build on others.

`base: other.yaml` (or a list, later ones winning) is relative to the file that says it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pretrain.config.sized import lay_over
from pretrain.config.source import Layer, Node, kind_of, read_yaml_file
from pretrain.config.suggest import did_you_mean_path
from pretrain.errors import ConfigError

BASE_KEY = "base"


def read_with_bases(path: Path) -> Node:
    """The file laid over its bases; only its own values count as `Layer.FILE`.

    Raises:
        ConfigError: a file is missing or malformed, or the bases form a cycle.
    """
    return _read(path, Layer.FILE, chain=())


def _read(path: Path, layer: Layer, chain: tuple[Path, ...]) -> Node:
    if path.resolve() in [earlier.resolve() for earlier in chain]:
        names = " -> ".join(str(step) for step in (*chain, path))
        raise ConfigError(f"the bases of {chain[0]} form a cycle: {names}. Remove one `base:`")
    if not path.exists():
        raise ConfigError(_missing_message(path, chain))
    node = read_yaml_file(path, layer)
    assert isinstance(node.value, dict)
    bases = _base_paths(path, node)
    own = replace(node, value={key: child for key, child in node.value.items() if key != BASE_KEY})
    merged: Node | None = None
    for base in bases:
        below = _read(base, Layer.BASE, (*chain, path))
        merged = below if merged is None else lay_over(merged, below)
    return own if merged is None else lay_over(merged, own)


def _base_paths(path: Path, node: Node) -> list[Path]:
    assert isinstance(node.value, dict)
    if BASE_KEY not in node.value:
        return []
    base = node.value[BASE_KEY]
    entries = base.value if isinstance(base.value, list) else [base]
    paths = []
    for entry in entries:
        if not isinstance(entry.value, str) or not entry.value:
            raise ConfigError(
                f"{entry.origin}: base is {kind_of(entry)}, expected the path of a configuration file or a list of them"
            )
        paths.append(Path(os.path.normpath(path.parent / os.path.expanduser(entry.value))))
    return paths


def _missing_message(path: Path, chain: tuple[Path, ...]) -> str:
    wanted_by = f" (the base of {chain[-1]})" if chain else ""
    return f"there is no configuration file {path}{wanted_by}{did_you_mean_path(path).removesuffix('.')}"
