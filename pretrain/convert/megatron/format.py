"""Checkpoints that Megatron-LM, or a program around Megatron-core, saved of a plain GPTModel: `torch_dist` files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamem.config.model import ModelConfig
from parallel.layout import padded_size
from pretrain.checkpoint.index import INDEX_FILE
from pretrain.checkpoint.store.paired import PairedReader, shapes_of
from pretrain.checkpoint.store.selected import Padded
from pretrain.checkpoint.store.tensors import TensorInfo
from pretrain.checkpoint.store.torch_dist import TorchDistReader, open_torch_dist
from pretrain.checkpoint.store.torch_pickle import Settings
from pretrain.checkpoint.store.torch_zip import open_zip
from pretrain.config.schema import RunConfig
from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.megatron.arguments import model_of
from pretrain.convert.megatron.names import pairs
from pretrain.convert.names import MEGATRON_LM
from pretrain.errors import CheckpointError, ConfigError

_LATEST_FILE = "latest_checkpointed_iteration.txt"
# Where what is no tensor is: up to megatron-core 0.18, and since.
_COMMON_FILE, _COMMON_OBJECT = "common.pt", "common_state/shard_0_1"
# Of the optimizer, its schedule and random numbers.
_NOT_WEIGHTS = ("optimizer.", "opt_param_scheduler", "rng_state", "rerun_state_machine_state")
# Parts of our models that a plain GPTModel does not have.
_NOT_PLAIN = ("memory", "latent_attention", "residual_streams", "multi_token_prediction")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class MegatronFormat:
    """See `SourceFormat`."""

    name = MEGATRON_LM
    takes_config = True

    def is_at(self, path: Path) -> bool:
        return (path / INDEX_FILE).is_file() or (path / _LATEST_FILE).is_file()

    def open(self, path: Path, step: int | None, config: RunConfig | None) -> OpenedCheckpoint:
        folder = _checkpoint_at(path, step)
        source = open_torch_dist(folder)
        if config is None:
            config = RunConfig(name=path.absolute().name, model=_saved_model(source))
        model = config.model
        odd = [key for key in _NOT_PLAIN if getattr(model, key) is not None]
        if odd:
            raise ConfigError(f"--config: model.{odd[0]} is set, and {folder} is of a plain GPTModel: leave it out")
        if model.vocab_size is None:
            raise ConfigError(
                f"--config: model.vocab_size is null, and {folder} has no tokenizer: set it to the number of token ids"
            )
        found = pairs(model, vocab_size=model.vocab_size, tensors=source.tensors)
        reader = PairedReader(found, source)
        _check_all_used(model, source.tensors, shapes_of(pair.theirs for pair in found), folder)
        padded = (padded_size(model.vocab_size, model.vocab_size_multiple), model.hidden_size)
        return OpenedCheckpoint(folder, self.name, Padded(reader, dict.fromkeys(_VOCABULARY, padded)), config)


def _checkpoint_at(path: Path, step: int | None) -> Path:
    """The folder of a checkpoint: `path`, or in it that of a step, or the one that its file names as the latest."""
    if (path / INDEX_FILE).is_file():
        if step is not None:
            raise ConfigError(f"--step is {step}, and {path} is one checkpoint: leave it out")
        return path
    if step is None:
        text = (path / _LATEST_FILE).read_text(encoding="utf-8", errors="replace").strip()[:40]
        if text != "release" and not (text.isascii() and text.isdecimal()):
            raise CheckpointError(f"{path / _LATEST_FILE} holds {text!r}, no iteration: name the checkpoint's folder")
        step = None if text == "release" else int(text)
    folder = path / ("release" if step is None else f"iter_{step:07d}")
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {INDEX_FILE}, so it is no checkpoint in the format torch_dist: let Megatron-LM save it with "
            "--ckpt-format torch_dist"
        )
    return folder


def _saved_model(source: TorchDistReader) -> ModelConfig:
    """The model of the arguments that Megatron-LM saves, of which nothing is run.

    Raises:
        ConfigError: the checkpoint holds no arguments.
        CheckpointError: the arguments cannot be read, or are of a model that ours cannot be.
    """
    path = source.folder / _COMMON_FILE
    common: Any = open_zip(path) if path.is_file() else source.loaded(_COMMON_OBJECT)
    match common:
        # Of ranks' objects there is a list.
        case {"args": Settings() as arguments} | [{"args": Settings() as arguments}]:
            return model_of(arguments.values, str(source.folder))
    raise ConfigError(
        f"{source.folder} holds no arguments of Megatron-LM's, which describe its model: name a configuration with "
        "--config FILE, model.vocab_size included"
    )


def _check_all_used(
    model: ModelConfig, found: Mapping[str, TensorInfo], used: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Refuse weights that the configuration does not explain: biases, shared experts, other shapes."""
    for name, info in found.items():
        if name.startswith(_NOT_WEIGHTS) or (name == "output_layer.weight" and model.tied_embeddings):
            continue
        if name not in used:
            raise CheckpointError(f"{folder}: there is a tensor {name}, which its configuration does not explain")
        # Rows that pad the vocabulary are not read.
        first = 1 if name in _VOCABULARY else 0
        if info.shape[first:] != used[name][first:]:
            raise CheckpointError(
                f"{folder}: {name} has the shape {info.shape}, and its configuration says {used[name]}"
            )
