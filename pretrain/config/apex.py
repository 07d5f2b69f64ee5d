"""Parts of a step that Apex computes (`train.apex`): the extensions that they need, and what they do not go with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from pretrain.config.fields import ApexPart
from pretrain.config.schema import RunConfig

EXTENSIONS: dict[ApexPart, str] = {
    "norms": "fused_layer_norm_cuda",
    "weight_gradients": "fused_weight_gradient_mlp_cuda",
    "adamw": "amp_C",
}
"""Compiled modules of Apex by the part that they compute."""


def without_apex(config: RunConfig) -> RunConfig:
    """The configuration by PyTorch alone, for models that are not trained here, on machines that may lack Apex."""
    return replace(config, train=replace(config.train, apex=()))


def apex_problems(config: RunConfig) -> Iterator[str]:
    """Parts that are there twice, or that another package computes."""
    parts = config.train.apex
    for part in sorted({part for part in parts if parts.count(part) > 1}):
        yield f"train.apex has {part} twice: name it once"
    if config.model.implementation == "transformer_engine":
        for part, whose in (
            ("norms", "has norms of its own"),
            ("adamw", "has an AdamW, which Megatron takes for Apex's"),
        ):
            if part in parts:
                yield (
                    f"train.apex has {part}, but model.implementation is transformer_engine, which {whose}: remove {part}, "
                    "or use model.implementation: local"
                )


def missing_extensions(config: RunConfig) -> Iterator[str]:
    """Parts whose compiled modules are not installed."""
    for part in dict.fromkeys(config.train.apex):
        missing = [name for name in ("apex", EXTENSIONS[part]) if importlib.util.find_spec(name) is None]
        if missing:
            yield (
                f"train.apex has {part}, but {' and '.join(missing)} cannot be imported: install Apex from its sources "
                f"(github.com/NVIDIA/apex) with its C++ and CUDA extensions, or remove {part}"
            )
