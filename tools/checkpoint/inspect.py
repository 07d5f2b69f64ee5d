"""`megamem checkpoint inspect`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pretrain.config.loader import to_dict
from pretrain.convert.listing import Listing, is_native, listing_of, native_listing
from pretrain.printable import printable
from tools.checkpoint.command import opened
from tools.common.words import describe_size
from tools.parameter_table import markdown_table


def run(args: argparse.Namespace) -> int:
    """Print what a checkpoint holds."""
    # Not by opening it, for which PyTorch takes seconds to load.
    is_ours = is_native(args.path)
    checkpoint = native_listing(args.path, args.step) if is_ours else listing_of(opened(args.path, args.step))
    print(json.dumps(_as_json(checkpoint), indent=1) if args.json else _describe(checkpoint))
    return 0


def _as_json(checkpoint: Listing) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format_name,
        **checkpoint.facts,
        "config": to_dict(checkpoint.config),
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": info.dtype,
                "bytes": info.num_bytes,
                "kind": _kind(name),
            }
            for name, info in sorted(checkpoint.tensors.items())
        },
    }


def _kind(name: str) -> str:
    if name.startswith("optimizer."):
        return "optimizer"
    return "table" if name.startswith("banks.") else "weight"


def _weights(checkpoint: Listing) -> list[str]:
    return [name for name in checkpoint.tensors if _kind(name) != "optimizer"]


def _describe(checkpoint: Listing) -> str:
    tensors = checkpoint.tensors
    state: dict[str, int] = {}
    for name in (name for name in tensors if _kind(name) == "optimizer"):
        weight = name.split(".", 3)[3]
        state[weight] = state.get(weight, 0) + tensors[name].num_bytes
    rows = [
        (
            name,
            _kind(name),
            " x ".join(map(str, tensors[name].shape)) or "1",
            tensors[name].dtype,
            describe_size(tensors[name].num_bytes),
            describe_size(state[name]) if name in state else "",
        )
        for name in sorted(_weights(checkpoint), key=_by_number)
    ]
    head = ("tensor", "kind", "shape", "dtype", "bytes", "optimizer state")
    return f"{_header(checkpoint, sum(state.values()))}\n\n{markdown_table(head, rows)}"


def _header(checkpoint: Listing, state_bytes: int) -> str:
    tensors, config = checkpoint.tensors, checkpoint.config
    of_tables = sum(tensors[name].num_bytes for name in _weights(checkpoint) if _kind(name) == "table")
    of_weights = sum(tensors[name].num_bytes for name in _weights(checkpoint)) - of_tables
    lines = {"checkpoint": f"{checkpoint.path} ({checkpoint.format_name})"}
    if facts := checkpoint.facts:
        layout, stage = config.parallel, config.stage
        within = "" if stage is None else f", stage {stage.name}"
        lines["step"] = f"{facts['step']:,} of {config.run_steps:,}{within}, {facts['consumed_tokens']:,} tokens"
        lines["layout"] = (
            f"tensor {layout.tensor}, pipeline {layout.pipeline} x {layout.virtual_pipeline}, context {layout.context}, "
            f"memory {layout.memory}{f' ({layout.memory_rows} of rows)' if layout.memory_rows > 1 else ''}; fits any other"
        )
        lines["written by"] = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    kind = "dense" if config.model.moe is None else "mixture of experts"
    lines["model"] = (
        f"{config.name}: {config.model.num_layers} blocks of width {config.model.hidden_size}, "
        f"{config.model.memory_kinds if config.model.memories else kind}"
    )
    lines["bytes"] = (
        f"{describe_size(of_weights)} weights, {describe_size(of_tables)} tables, {describe_size(state_bytes)} "
        "optimizer state"
    )
    width = max(map(len, lines))
    return "\n".join(f"{title:<{width}}  {printable(text)}" for title, text in lines.items())


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts block 10 behind block 9."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in name.split("."))
