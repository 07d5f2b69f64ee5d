"""`megamem checkpoint inspect`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pretrain.checkpoint.formats.format import OpenedCheckpoint
from pretrain.checkpoint.formats.native import describe
from pretrain.config.loader import to_dict
from tools.checkpoint.command import opened
from tools.parameter_table import markdown_table
from tools.words import size_in_words


def run(args: argparse.Namespace) -> int:
    """Print what a checkpoint holds."""
    checkpoint = opened(args.path, args.step)
    print(json.dumps(_as_json(checkpoint), indent=1) if args.json else _in_words(checkpoint))
    return 0


def _as_json(checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format_name,
        **_facts(checkpoint),
        "config": to_dict(checkpoint.config),
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": str(info.dtype).removeprefix("torch."),
                "bytes": info.num_bytes,
                "kind": _kind(name),
            }
            for name, info in sorted(checkpoint.reader.tensors.items())
        },
    }


def _facts(checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    return {} if checkpoint.saved is None else describe(checkpoint.saved)


def _kind(name: str) -> str:
    if name.startswith("optimizer."):
        return "optimizer"
    return "table" if name.startswith("banks.") else "weight"


def _in_words(checkpoint: OpenedCheckpoint) -> str:
    tensors = checkpoint.reader.tensors
    state: dict[str, int] = {}
    for name in checkpoint.optimizer_state:
        weight = name.split(".", 3)[3]
        state[weight] = state.get(weight, 0) + tensors[name].num_bytes
    rows = [
        (
            name,
            _kind(name),
            " x ".join(map(str, tensors[name].shape)) or "1",
            str(tensors[name].dtype).removeprefix("torch."),
            size_in_words(tensors[name].num_bytes),
            size_in_words(state[name]) if name in state else "",
        )
        for name in sorted(checkpoint.weights, key=_by_number)
    ]
    head = ("tensor", "kind", "shape", "dtype", "bytes", "optimizer state")
    return f"{_header(checkpoint, sum(state.values()))}\n\n{markdown_table(head, rows)}"


def _header(checkpoint: OpenedCheckpoint, state_bytes: int) -> str:
    tensors, config = checkpoint.reader.tensors, checkpoint.config
    of_tables = sum(tensors[name].num_bytes for name in checkpoint.weights if _kind(name) == "table")
    of_weights = sum(tensors[name].num_bytes for name in checkpoint.weights) - of_tables
    lines = {"checkpoint": f"{checkpoint.path} ({checkpoint.format_name})"}
    facts = _facts(checkpoint)
    if facts:
        layout, stage = config.parallel, config.stage
        within = "" if stage is None else f", stage {stage.name}"
        lines["step"] = f"{facts['step']:,} of {config.run_steps:,}{within}, {facts['consumed_tokens']:,} tokens"
        lines["layout"] = (
            f"tensor {layout.tensor}, pipeline {layout.pipeline} x {layout.virtual_pipeline}, context {layout.context}, "
            f"memory {layout.memory}; fits any other"
        )
        lines["written by"] = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    memory = config.model.memory
    kind = "dense" if config.model.moe is None else "mixture of experts"
    lines["model"] = (
        f"{config.name}: {config.model.num_layers} blocks of width {config.model.hidden_size}, "
        f"{memory.kind if memory is not None else kind}"
    )
    lines.update(checkpoint.notes or {})
    lines["bytes"] = (
        f"{size_in_words(of_weights)} weights, {size_in_words(of_tables)} tables, {size_in_words(state_bytes)} "
        "optimizer state"
    )
    width = max(map(len, lines))
    return "\n".join(f"{title:<{width}}  {text}" for title, text in lines.items())


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts block 10 behind block 9."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in name.split("."))
