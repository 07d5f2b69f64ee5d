"""`megamem patch counts`."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from parallel.machine.devices import num_visible_gpus
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate_layout
from pretrain.data.blend import open_blend
from pretrain.data.manifest import TRAIN
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, note_edited_config, saved_config
from pretrain.run.trained_data import refuse_other_tokenizer
from tools.common.ranks import fewest_ranks, run_on_ranks, started_world_size
from tools.common.words import plural
from tools.patch.paths import check_output

_MOST_SEQUENCES = 1000
"""Sequences that are read where nobody says how many."""


def run(args: argparse.Namespace) -> int:
    """Count reads, and write them."""
    check_output(args.output)
    folder = RunFolder(args.run)
    saved = find_checkpoint(folder, args.step)
    sets = [f"data.datasets={json.dumps([{'path': path} for path in args.data])}"] if args.data else []
    config = saved_config(saved, None if args.own_layout else ParallelConfig(), sets)
    note_edited_config(folder, saved)
    if config.model.memory is None:
        raise ConfigError(f"{args.run} is a model without memory, of which there are no rows to count")
    by_default = fewest_ranks(config.parallel) if args.own_layout else num_visible_gpus() or 2
    num_ranks = started_world_size() or args.nproc or by_default
    validate_layout(config, num_ranks)
    datasets = open_blend(config.data.datasets)
    paths = ", ".join(str(dataset.path) for dataset in datasets)
    refuse_other_tokenizer(datasets, folder, saved)
    num_tokens = sum(dataset.manifest.splits[TRAIN].num_tokens for dataset in datasets)
    in_all = max(1, num_tokens // config.train.sequence_length)
    wanted = args.sequences or min(in_all, _MOST_SEQUENCES)
    # As many for every replica, and for every pass of the pipeline.
    unit = num_ranks // (config.parallel.tensor * config.parallel.context)
    num_sequences = -(-wanted // unit) * unit
    print(
        f"{saved.path}: counting reads in {plural(num_sequences, 'sequence')} of {config.train.sequence_length} tokens, of some "
        f"{in_all:,} in {paths}",
        flush=True,
    )
    return run_on_ranks(partial(_count_rank, config, saved.path, num_sequences, args.output), num_ranks)


def _count_rank(config: RunConfig, checkpoint: Path, num_sequences: int, output: Path) -> None:
    """Count on one rank; the first one writes, and prints a line for each bank."""
    from pretrain.data.blend import check_blend
    from pretrain.data.dataset import build_train_dataset
    from pretrain.engine.session import session
    from pretrain.engine.tables.read_counts import write_read_counts
    from pretrain.evaluation.read_counts import count_reads
    from pretrain.evaluation.restore import restore_model

    with session(config) as groups:
        tokenizer = check_blend(config.data.datasets)
        chunks = restore_model(config, checkpoint, tokenizer, groups)
        samples = build_train_dataset(
            config.data.datasets,
            sequence_length=config.train.sequence_length,
            num_samples=num_sequences,
            seed=config.data_seed,
            tokenizer=tokenizer,
            cache_dir=output.parent,
            # Its order is computed: there is no index to write.
            shuffle="samples",
            separate_documents=config.data.documents == "separate",
        )
        counts = count_reads(
            chunks,
            samples,
            groups,
            sequence_length=config.train.sequence_length,
            pipeline=config.parallel.pipeline,
            progress=True,
        )
        if groups.is_main:
            write_read_counts(output, counts)
            for bank, found in counts.items():
                num_read, num_rows = int((found.reads > 0).sum()), len(found.reads)
                print(
                    f"bank {bank}: {int(found.reads.sum()):,} reads of {num_read:,} of {num_rows:,} rows "
                    f"({num_read / num_rows:.1%})"
                )
            print(f"written: {output}", flush=True)
