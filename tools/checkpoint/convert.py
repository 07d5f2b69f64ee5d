"""`megamem checkpoint convert`."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.schema import ParallelConfig
from pretrain.convert.names import HUGGINGFACE, NATIVE
from pretrain.convert.paths import check_destination
from pretrain.convert.resources import Resources
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from tools.checkpoint.command import opened
from tools.checkpoint.phases import Phases
from tools.common.words import describe_size, plural

if TYPE_CHECKING:
    import torch

TABLE_BITS = {"int8": 8, "int4": 4, None: None}
"""By the name that a person gives; None: as weights."""


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint, and say what was read back."""
    resources = Resources(args.workers, args.max_memory)
    layout = ParallelConfig(
        tensor=args.tensor, pipeline=args.pipeline, virtual_pipeline=args.virtual_pipeline, memory=args.memory
    )
    check_destination(args.destination)
    _refuse_options_without_effect(args)
    source = opened(args.source, args.step, args.config)

    # These import torch.
    from pretrain.convert.convert import convert
    from pretrain.convert.format import ConversionTarget
    from pretrain.convert.registry import FORMATS

    kind = FORMATS[args.format]
    can_hold = kind.holds_optimizer
    if args.with_optimizer and not (can_hold and source.optimizer_state):
        lacking = f"{source.path} has" if can_hold else f"the format {kind.name} holds"
        raise ConfigError(f"--with-optimizer: {lacking} no optimizer state here: leave it out to convert the weights")
    target = ConversionTarget(
        layout=layout,
        with_optimizer=can_hold and bool(source.optimizer_state) and not args.weights_only,
        dtype=dtype_named(args.dtype),
        max_file_bytes=args.max_file_size,
        table_bits=TABLE_BITS[args.tables],
    )
    print(f"{source.path} ({source.format_name}) -> {args.destination} ({kind.name})", flush=True)
    started_s = time.monotonic()
    with Phases() as phases:
        made = convert(source, kind, args.destination, target, resources, on_start=phases.start)
    kept = f", {plural(made.num_kept_files, 'file')} of an earlier start kept" if made.num_kept_files else ""
    print(
        f"equal, as read back: {plural(made.num_tensors, 'tensor')} of {describe_size(made.num_bytes)}{kept}\n"
        f"{time.monotonic() - started_s:.1f} s, "
        f"{describe_size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} of memory at most\n"
        f"written: {made.path}"
    )
    warn_of_tokenizer(made.path, source.tokenizer)
    if not target.with_optimizer and source.optimizer_state:
        print("without optimizer state: a run that starts from it begins with fresh moments")
    return 0


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype that a person names; None: as the weights are."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}[name]


def warn_of_tokenizer(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Say where transformers reads a folder's tokenizer another way than training did, if it has one."""
    from pretrain.convert.registry import FORMATS

    if tokenizer is None or not FORMATS[HUGGINGFACE].is_at(folder):
        return
    from pretrain.convert.huggingface.tokenizer_check import tokenizer_difference

    if (difference := tokenizer_difference(folder, tokenizer)) is not None:
        print(f"warning: {difference}", file=sys.stderr)


def _refuse_options_without_effect(args: argparse.Namespace) -> None:
    """Refuse options that the format has no use for."""
    sizes = ("tensor", "pipeline", "virtual_pipeline", "memory")
    unused = [name for name in sizes if getattr(args, name) != 1]
    if args.tables is not None and args.format != HUGGINGFACE:
        raise ConfigError(f"--tables has no effect on --format {args.format}: leave it out")
    if unused and args.format != NATIVE:
        raise ConfigError(f"--{unused[0].replace('_', '-')} has no effect on --format {args.format}: leave it out")
