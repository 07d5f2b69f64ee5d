"""Folders of Hugging Face's, written without the command that converts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pretrain.checkpoint.store.safetensors_store import open_safetensors, safetensors_files, write_index
from pretrain.checkpoint.store.tensors import TensorReader
from pretrain.config.schema import RunConfig
from pretrain.convert.huggingface.card import Figures
from pretrain.convert.huggingface.folder import exported_tensors, write_small_files
from pretrain.convert.huggingface.quantised import QuantisedTables
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


def in_fewer_bits(folder: Path, bits: int, path: Path) -> Path:
    """An exported folder once more, with tables of so many bits."""
    copy_small_files(folder, path)
    config = json.loads((folder / "config.json").read_text())
    for memory in filter(None, (config["memory"], config["second_memory"])):
        memory["table_bits"] = bits
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path, QuantisedTables(open_safetensors(folder), bits), 20_000, max_piece_bytes=100)
    return path


def copy_small_files(folder: Path, path: Path) -> None:
    """Copy all of an exported folder but its tensors."""
    for file in folder.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, path)
