"""Building a trained model with the weights of a checkpoint, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from parallel.sharded_bank import FetchRows
from pretrain.checkpoint.folder import read_state
from pretrain.checkpoint.newest import refuse_damage
from pretrain.checkpoint.run_entries import load_weights
from pretrain.checkpoint.safe_metadata import files_with_weights
from pretrain.checkpoint.shared_check import damage_seen_by_ranks
from pretrain.config.apex import without_apex
from pretrain.config.schema import RunConfig
from pretrain.data.blend import model_vocab_size
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.build import build_unset_chunks
from pretrain.run.saved_run import ranks_were_started


def restore_model(
    config: RunConfig,
    path: Path,
    tokenizer: Tokenizer,
    groups: ParallelGroups,
    *,
    fetch_rows: FetchRows | None = None,
) -> Sequence[MemoryGPTModel]:
    """This rank's model chunks with the weights of the checkpoint in a folder. Collective.

    `config` is the checkpoint's, with the layout of `groups`; the tokenizer decides the embedding's size. With
    `fetch_rows` the checkpoint's tables are not read: rows come from there.

    Raises:
        CheckpointError: on every rank: the checkpoint is damaged, or cannot be read.
    """
    if config.checkpoint.check_hashes and ranks_were_started():
        saved = read_state(path)
        refuse_damage(saved, damage_seen_by_ranks(saved, files_with_weights(saved)))
    vocab_size = model_vocab_size(config.model, tokenizer)
    chunks = build_unset_chunks(without_apex(config), groups, vocab_size=vocab_size, fetch_rows=fetch_rows)
    load_weights(path, chunks)
    for chunk in chunks:
        chunk.eval()
    return chunks
