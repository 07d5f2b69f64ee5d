"""Folders of Hugging Face's: models of ours for transformers, and Llama and Qwen3 to train on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from parallel.layout import padded_size
from pretrain.checkpoint.formats.format import OpenedCheckpoint, Target
from pretrain.checkpoint.formats.names import HUGGINGFACE
from pretrain.checkpoint.huggingface.card import figures_of
from pretrain.checkpoint.huggingface.folder import CONFIG_FILE, open_folder, write_small_files
from pretrain.checkpoint.huggingface.names import pairs
from pretrain.checkpoint.huggingface.tokenizer_files import read_tokenizer
from pretrain.checkpoint.store.files import WrittenFile
from pretrain.checkpoint.store.paired import PairedReader
from pretrain.checkpoint.store.safetensors_store import open_safetensors, safetensors_files, write_index
from pretrain.checkpoint.store.selected import Padded
from pretrain.checkpoint.store.tensors import TensorInfo, TensorReader, inverted
from pretrain.config.loader import from_dict, to_dict
from pretrain.config.schema import RunConfig
from pretrain.errors import CheckpointError
from pretrain.folder import RunFolder
from pretrain.state import RunState

ORIGIN_FILE = "megamem.json"
"""What a model of ours was: its configuration, and how far its run had come."""


class HuggingFaceFormat:
    """See `CheckpointFormat`."""

    name = HUGGINGFACE
    holds_optimizer = False

    def is_at(self, path: Path) -> bool:
        return (path / CONFIG_FILE).is_file() and any(path.glob("*.safetensors"))

    def open(self, path: Path, step: int | None) -> OpenedCheckpoint:
        origin = _origin(path)
        if origin is not None:
            return _open_own(path, *origin)
        imported = open_folder(path)
        config = RunConfig(name=path.absolute().name, model=imported.model)
        return OpenedCheckpoint(path, self.name, imported.tensors, config, tokenizer=imported.tokenizer)

    def convert(self, source: OpenedCheckpoint, target: Target) -> HuggingFaceConversion:
        return HuggingFaceConversion(source, target)


class HuggingFaceConversion:
    """See `Conversion`."""

    def __init__(self, source: OpenedCheckpoint, target: Target) -> None:
        if source.tokenizer is None:
            raise CheckpointError(f"{source.path} has no tokenizer, which a model of Hugging Face's has beside it")
        self._source, self._tokenizer = source, source.tokenizer
        self._weights = source.weights_in(target.dtype)
        found = pairs(source.config.model, vocab_size=source.vocab_size, tensors=self._weights.tensors)
        self.reader = PairedReader(inverted(found), self._weights)
        self.files = safetensors_files(self.reader.tensors, target.max_file_bytes)

    def finish(self, folder: Path, written: Sequence[WrittenFile]) -> None:
        source = self._source
        write_index(folder, self.files)
        metrics = RunFolder(source.path.parent.parent).metrics
        write_small_files(
            source.config,
            self._weights.tensors,
            folder,
            tokenizer=self._tokenizer,
            vocab_size=source.vocab_size,
            figures=figures_of(source.state, metrics),
        )
        model = replace(source.config.model, vocab_size=source.vocab_size)
        config = to_dict(RunConfig(name=source.config.name, seed=source.config.seed, model=model))
        content = {"config": {key: config[key] for key in ("name", "seed", "model")}, "run": asdict(source.state)}
        (folder / ORIGIN_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def reopen(self, folder: Path) -> TensorReader:
        return open_safetensors(folder)


def _origin(path: Path) -> tuple[RunConfig, RunState] | None:
    """What a folder that we wrote says of its model; None of others."""
    file = path / ORIGIN_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return from_dict(content["config"], f"the configuration in {file}"), RunState(**content["run"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): copy the folder again") from error


def _open_own(path: Path, config: RunConfig, state: RunState) -> OpenedCheckpoint:
    model, source = config.model, open_safetensors(path)
    assert model.vocab_size is not None
    found = pairs(model, vocab_size=model.vocab_size, tensors=_memory_tensors(config, source.tensors))
    padded = (padded_size(model.vocab_size, model.vocab_size_multiple), model.hidden_size)
    reader = PairedReader(found, source)
    vocabulary = dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), padded)
    return OpenedCheckpoint(
        path=path,
        format_name=HUGGINGFACE,
        reader=Padded(reader, vocabulary),
        config=config,
        state=state,
        tokenizer=read_tokenizer(path, json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))),
    )


def _memory_tensors(config: RunConfig, theirs: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tables, and the weights of memory layers, under our names."""
    found = {name.removeprefix("model."): info for name, info in theirs.items() if name.startswith("model.banks.")}
    for index, span in enumerate(config.model.memory_spans):
        prefix = f"model.layers.{span.read}.memory."
        found.update(
            {
                f"{config.model.memory_name(index)}.{name.removeprefix(prefix)}": info
                for name, info in theirs.items()
                if name.startswith(prefix)
            }
        )
    return found
