"""Folders of Hugging Face's, written without the command that converts."""

from __future__ import annotations

from pathlib import Path

from pretrain.checkpoint.store.safetensors_store import safetensors_files, write_index
from pretrain.checkpoint.store.tensors import TensorReader
from pretrain.config.schema import RunConfig
from pretrain.convert.huggingface.card import Figures
from pretrain.convert.huggingface.folder import exported_tensors, write_small_files
from pretrain.data.tokenizer import Tokenizer


def export(
    config: RunConfig,
    source: TensorReader,
    folder: Path,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    figures: Figures,
    max_file_bytes: int = 1 << 30,
) -> None:
    """Write a checkpoint's model into a folder, which is there and empty."""
    tensors = exported_tensors(config, source, vocab_size=vocab_size)
    small = {"tokenizer": tokenizer, "vocab_size": vocab_size, "figures": figures}
    write_small_files(config, source, folder, **small)
    write_safetensors(folder, tensors, max_file_bytes)


def write_safetensors(folder: Path, tensors: TensorReader, max_file_bytes: int, max_piece_bytes: int = 1 << 26) -> None:
    """Write all of a reader's tensors into a folder, piece by piece."""
    files = safetensors_files(tensors.tensors, max_file_bytes)
    for file in files:
        file.write(folder / file.name, tensors.read, max_piece_bytes)
    write_index(folder, files)
