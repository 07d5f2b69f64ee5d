"""The YAML files that say what a comparison tries, `--tune` and `--grow`: mappings with keys of their own."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import ConfigError


def read_keys(path: Path, option: str, kind: str, keys: Collection[str]) -> dict[str, Any]:
    """The content of a file that has exactly these keys.

    Args:
        option: the option that names the file.
        kind: name of such files, in messages.

    Raises:
        ConfigError: the file is wrong; the message names it, what is wrong and what is expected.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{option} is {path}, which cannot be read: {error}") from error
    if not isinstance(content, dict) or set(content) != set(keys):
        listed = (" and " if len(keys) == 2 else ", ").join(keys)
        raise ConfigError(f"{path}: a {kind} file has the keys {listed}, and no other ones")
    return content
