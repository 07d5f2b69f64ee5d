"""Opening a trained model from its run folder, for evaluation and generation, on any layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.build import build_unset_chunks
from pretrain.checkpoint.folder import SavedState, newest_complete, read_state, step_folder
from pretrain.checkpoint.run import load_weights
from pretrain.config.loader import from_dict
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import CheckpointError
from pretrain.folder import RunFolder
from pretrain.run import model_vocab_size


def find_checkpoint(folder: RunFolder, step: int | None, *, before: int | None = None) -> SavedState:
    """A run's checkpoint of a step, or its newest complete one (of those from before a step).

    Raises:
        CheckpointError: there is none.
    """
    if not folder.path.is_dir():
        raise CheckpointError(
            f"{folder.path}: no such run folder. Train one with `megamem train CONFIG --run-dir {folder.path}`"
        )
    if step is not None:
        return read_state(step_folder(folder.checkpoints, step))
    saved, problems = newest_complete(folder.checkpoints, before=before)
    for problem in problems:
        print(f"passed over a damaged checkpoint: {problem}", file=sys.stderr)
    if saved is None and before is not None:
        raise CheckpointError(
            f"{folder.checkpoints} has no checkpoint from before step {before}: checkpoint.every_steps and "
            "checkpoint.keep_last say which ones a run keeps"
        )
    if saved is None:
        raise CheckpointError(f"{folder.path} has no checkpoint yet. Train it first with `megamem train`")
    return saved


def saved_config(saved: SavedState, parallel: ParallelConfig | None) -> RunConfig:
    """The configuration of a checkpoint, on its own layout or another."""
    config = from_dict(saved.config, f"the configuration in {saved.path}")
    return config if parallel is None else replace(config, parallel=parallel)


def restore_model(
    config: RunConfig, path: Path, tokenizer: Tokenizer, groups: ParallelGroups
) -> Sequence[MemoryGPTModel]:
    """This rank's model chunks with the weights of the checkpoint in a folder. Collective.

    `config` is the checkpoint's, with the layout of `groups`; the tokenizer decides the embedding's size.
    """
    chunks = build_unset_chunks(config, groups, vocab_size=model_vocab_size(config.model, tokenizer))
    load_weights(path, chunks)
    for chunk in chunks:
        chunk.eval()
    return chunks
