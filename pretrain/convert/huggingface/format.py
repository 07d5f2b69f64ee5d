"""Folders of Hugging Face's: models of ours for transformers, and Llama, Qwen and Mistral to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pretrain.checkpoint.store.files import WrittenFile
from pretrain.checkpoint.store.safetensors_store import open_safetensors, safetensors_files, write_index
from pretrain.checkpoint.store.tensors import TensorReader
from pretrain.config.schema import RunConfig
from pretrain.convert.format import ConversionTarget, OpenedCheckpoint
from pretrain.convert.huggingface.card import figures_of
from pretrain.convert.huggingface.folder import CONFIG_FILE, exported_tensors, open_folder, write_small_files
from pretrain.convert.huggingface.quantised import QuantisedTables
from pretrain.convert.huggingface.sums import read_sums, write_sums
from pretrain.convert.names import HUGGINGFACE
from pretrain.errors import CheckpointError, ConfigError
from pretrain.run.folder import RunFolder


class HuggingFaceFormat:
    """See `CheckpointFormat`."""

    name = HUGGINGFACE
    takes_config = False
    holds_optimizer = False

    def is_at(self, path: Path) -> bool:
        return (path / CONFIG_FILE).is_file()

    def open(self, path: Path, step: int | None, config: RunConfig | None) -> OpenedCheckpoint:
        imported = open_folder(path)
        own = imported.config
        named = replace(own, name=path.absolute().name) if own.name == RunConfig().name else own
        tensors, tokenizer = imported.tensors, imported.tokenizer
        return OpenedCheckpoint(path, self.name, tensors, named, tokenizer=tokenizer, sums=read_sums(path))

    def convert(self, source: OpenedCheckpoint, target: ConversionTarget) -> HuggingFaceConversion:
        return HuggingFaceConversion(source, target)


class HuggingFaceConversion:
    """See `Conversion`."""

    def __init__(self, source: OpenedCheckpoint, target: ConversionTarget) -> None:
        if source.tokenizer is None:
            raise CheckpointError(
                f"{source.path} has no tokenizer, which a folder of Hugging Face's has: copy the run's"
            )
        self._source, self._tokenizer = source, source.tokenizer
        self._weights = source.weights_in(target.dtype)
        self._table_bits = target.table_bits
        self.reader: TensorReader = exported_tensors(source.config, self._weights, vocab_size=source.vocab_size)
        if target.table_bits is not None:
            quantised = QuantisedTables(self.reader, target.table_bits)
            if not quantised.has_tables:
                raise ConfigError(f"--tables is int{target.table_bits}, and {source.path} has no memory: leave it out")
            self.reader = quantised
        self.files = safetensors_files(self.reader.tensors, target.max_file_bytes)

    def finish(self, folder: Path, written: Sequence[WrittenFile]) -> None:
        source = self._source
        write_index(folder, self.files)
        metrics = RunFolder(source.path.parent.parent).metrics
        write_small_files(
            source.config,
            self._weights,
            folder,
            tokenizer=self._tokenizer,
            vocab_size=source.vocab_size,
            figures=figures_of(source.state, metrics),
            table_bits=self._table_bits,
        )
        write_sums(folder)

    def reopen(self, folder: Path) -> TensorReader:
        return open_safetensors(folder)
