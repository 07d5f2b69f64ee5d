"""Rotary positions in a `config.json`: `rope_parameters`, and `rope_theta` with `rope_scaling` of older files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamem.attention.rotary import ntk_base
from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import ModelConfig
from pretrain.convert.huggingface.refused import refused

# Their names of our keys, by `rope_type`; those that transformers gives a default, with it.
_KEYS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
    },
}
_NEEDED = {"factor", "original_length", "low_frequency_factor", "high_frequency_factor"}
# Other keys that `rope_parameters` may hold.
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Values that are what a file means without the key.
_IDLE = {"truncate": (True,), "mscale": (None,), "mscale_all_dim": (None,), "attention_factor": (None,)}


def rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """Theta, the kind of scaling and its keys, as transformers reads them."""
    scaling, base = model.rotary_scaling, float(model.rotary_base)
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    if scaling.kind == "ntk":
        # No more than another theta.
        return {"rope_type": "default", "rope_theta": ntk_base(scaling.factor, base, model.rotary_width)}
    values = {theirs: getattr(scaling, ours) for ours, theirs in _KEYS[scaling.kind].items()}
    given = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": scaling.kind, "rope_theta": base, **given}


def imported_base(config: Mapping[str, Any], origin: str) -> int:
    """Theta, of either form in which files say it.

    Raises:
        CheckpointError: theta is no whole number.
    """
    base = config.get("rope_theta", 10000.0)
    for _, rope in _sections(config, origin):
        base = rope.get("rope_theta", base)
    if not isinstance(base, int | float) or base != int(base) or base < 1:
        raise refused(origin, "rope_theta", base, "imported models have a whole number")
    return int(base)


def imported_scaling(config: Mapping[str, Any], origin: str) -> RotaryScalingConfig | None:
    """The scaling that a file asks for; None: none.

    Raises:
        CheckpointError: the scaling is one that our models do not have.
    """
    found = None
    for key, rope in _sections(config, origin):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            continue
        if kind not in _KEYS:
            raise refused(origin, key, rope, f"imported models scale positions by {', '.join(_KEYS)} or not at all")
        names = _KEYS[kind]
        odd = [name for name in rope.keys() - _COMMON - set(names.values()) if rope[name] not in _IDLE.get(name, ())]
        if odd:
            raise refused(origin, key, rope, f"imported models have no {', '.join(sorted(odd))} in {kind}")
        lacks = [theirs for ours, theirs in names.items() if ours in _NEEDED and rope.get(theirs) is None]
        if lacks:
            raise refused(origin, key, rope, f"{kind} needs {', '.join(lacks)}")
        values: dict[str, Any] = {ours: rope[theirs] for ours, theirs in names.items() if rope.get(theirs) is not None}
        if not all(isinstance(value, int | float) for value in values.values()):
            raise refused(origin, key, rope, "its values must be numbers")
        try:
            found = RotaryScalingConfig(kind, **values)
        except ValueError as error:
            raise refused(origin, key, rope, str(error)) from error
    return found


def _sections(config: Mapping[str, Any], origin: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The mappings that say it, by their keys."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise refused(origin, key, rope, "it must be a mapping")
        if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise refused(origin, key, rope, "imported models turn whole heads")
        found.append((key, rope))
    return found
