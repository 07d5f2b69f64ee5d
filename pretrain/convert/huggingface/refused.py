"""Refusal of a key of a `config.json`."""

from __future__ import annotations

from typing import Any

from pretrain.errors import CheckpointError


def refused(origin: str, key: str, value: Any, why: str) -> CheckpointError:
    """The error about a key whose value no model of ours has; `origin` names the file."""
    return CheckpointError(f"{origin}: {key} is {value}: {why}")
