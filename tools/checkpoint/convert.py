"""`megamem checkpoint convert`."""

from __future__ import annotations

import argparse
import resource
import time

import torch

from pretrain.checkpoint.formats.convert import Resources, convert
from pretrain.checkpoint.formats.format import Target
from pretrain.checkpoint.formats.registry import FORMATS
from pretrain.config.schema import ParallelConfig
from pretrain.errors import ConfigError
from tools.checkpoint.command import opened
from tools.checkpoint.phases import Phases
from tools.words import plural, size_in_words

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint, and say what was read back."""
    resources = Resources(args.workers, args.max_memory)
    layout = ParallelConfig(
        tensor=args.tensor, pipeline=args.pipeline, virtual_pipeline=args.virtual_pipeline, memory=args.memory
    )
    source = opened(args.source, args.step)
    kind = FORMATS[args.format]
    if args.with_optimizer and not (kind.holds_optimizer and source.optimizer_state):
        lacking = source.path if kind.holds_optimizer else f"the format {kind.name}"
        raise ConfigError(f"--with-optimizer: {lacking} has no optimizer state: leave it out to convert the weights")
    target = Target(
        layout=layout,
        with_optimizer=kind.holds_optimizer and bool(source.optimizer_state) and not args.weights_only,
        dtype=_DTYPES[args.dtype],
        max_file_bytes=args.max_file_size,
    )
    print(f"{source.path} ({source.format_name}) -> {args.destination} ({kind.name})", flush=True)
    started_s = time.monotonic()
    with Phases() as phases:
        made = convert(source, kind, args.destination, target, resources, on_start=phases.start)
    kept = f", {plural(made.num_kept_files, 'file')} of an earlier start kept" if made.num_kept_files else ""
    print(
        f"equal, as read back: {plural(made.num_tensors, 'tensor')} of {size_in_words(made.num_bytes)}{kept}\n"
        f"{time.monotonic() - started_s:.1f} s, "
        f"{size_in_words(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} of memory at most\n"
        f"written: {made.path}"
    )
    if not target.with_optimizer and source.optimizer_state:
        print("without optimizer state: a run that starts from it begins with fresh moments")
    return 0
