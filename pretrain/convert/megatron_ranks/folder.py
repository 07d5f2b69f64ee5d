"""The folder of such a checkpoint: written whole, or opened as named tensors.

    latest_checkpointed_iteration.txt              the newest iteration, in digits
    iter_0000100/mp_rank_00/model_optim_rng.pt     a file of `torch.save` per rank

A file's object has `args`, `checkpoint_version`, `iteration`, the weights under `model`, or under `model0`, `model1`,
... for the chunks of interleaved stages, and perhaps an `optimizer`'s state.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamem.config import ModelConfig
from parallel.atomic_write import sync
from pretrain.checkpoint.store.lazy_tensor import LazyTensor
from pretrain.checkpoint.store.paired import PairedReader, shapes_of
from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo, TensorReader, inverted, pieces
from pretrain.checkpoint.store.torch_pickle import Inert
from pretrain.checkpoint.store.torch_zip import open_zip
from pretrain.checkpoint.store.torch_zip_writer import StoredTensor, write_zip
from pretrain.config.schema import RunConfig
from pretrain.convert.megatron_ranks.arguments import arguments_of, layout_of, model_of
from pretrain.convert.megatron_ranks.layout import FILE_NAME, RankFile, RankLayout, is_rank_folder
from pretrain.convert.megatron_ranks.optimizer import (
    check_optimizer,
    held_state,
    optimizer_entries,
    optimizer_pairs,
)
from pretrain.convert.megatron_ranks.pairs import EMBEDDING, extra_states, rank_pairs
from pretrain.errors import CheckpointError, ConfigError
from pretrain.state import RunState

TRACKER = "latest_checkpointed_iteration.txt"
_VERSION = 3.0
_COMPARED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class RanksCheckpoint:
    """An opened checkpoint; a `TensorReader` of tensors named `<rank's folder>/<model key>/<name>`.

    Attributes:
        path: the folder of its iteration.
        iteration: optimizer steps done.
        arguments: Megatron-LM's, by name.
        model: what they say of the model.
        layout: what they say of the files.
    """

    path: Path
    iteration: int
    arguments: Mapping[str, Any]
    model: ModelConfig
    layout: RankLayout
    held: Mapping[str, LazyTensor]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorReader`."""
        return {name: tensor.info for name, tensor in self.held.items()}

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        if region.name not in self.held:
            raise CheckpointError(f"{self.path} has no tensor {region.name}")
        return self.held[region.name].read(region.offset, region.shape)

    @property
    def has_optimizer(self) -> bool:
        """Whether main weights and moments are there."""
        return any("/optimizer." in name for name in self.held)

    @property
    def pairs(self) -> list[Pair]:
        """Our tensors in its files: see `rank_pairs`, and `optimizer_pairs` where it has an optimizer's state."""
        assert self.model.vocab_size is not None
        weights = rank_pairs(self.model, self.model.vocab_size, self.layout)
        if not self.has_optimizer:
            return weights
        return weights + optimizer_pairs(weights, self.held[weights[0].theirs.name].dtype)

    def as_ours(self) -> PairedReader:
        """The same tensors under our names and in our shapes."""
        return PairedReader(self.pairs, self)


@dataclass(frozen=True)
class RankOutput:
    """A rank's file to be written, see `OutputFile`.

    Attributes:
        name: its path within the checkpoint.
        tree: the object, with a `StoredTensor` in place of each tensor.
        num_bytes: of the tensors.
    """

    name: str
    tree: Mapping[str, Any]
    num_bytes: int

    def write(self, path: Path, read: Callable[[Region], Tensor], max_piece_bytes: int) -> None:
        """See `OutputFile`."""
        # Of the widest elements.
        write_zip(path, self.tree, read, max_elements=max(1, max_piece_bytes // 8))


class RanksPlan:
    """A run as a checkpoint that Megatron-LM loads: the files, and what is in them.

    Attributes:
        reader: of the tensors, named `<rank's folder>/<model key>/<name>`.
        files: of the ranks.
    """

    def __init__(
        self,
        ours: TensorReader,
        *,
        config: RunConfig,
        state: RunState,
        layout: RankLayout,
        with_optimizer: bool = False,
    ) -> None:
        """
        Args:
            ours: weights by global names, and optimizer state as `optimizer.state.<kind>.<name>`.
            config: the run's.
            state: how far it has come.
            layout: of the files.
            with_optimizer: write main weights and moments too.

        Raises:
            CheckpointError: a tensor is missing.
            ConfigError: the model cannot be divided so, or has a memory, or experts and optimizer state.
        """
        model = config.model
        layout.check(model, 0)
        if EMBEDDING not in ours.tensors:
            raise CheckpointError(f"{EMBEDDING} is missing")
        vocabulary, dtype = ours.tensors[EMBEDDING].shape[0], ours.tensors[EMBEDDING].dtype
        pairs = rank_pairs(model, vocabulary, layout)
        arguments = arguments_of(config, state, layout, vocabulary=vocabulary, with_optimizer=with_optimizer)
        if with_optimizer:
            check_optimizer(model)
            # Main weights that are the weights themselves are written once.
            pairs += [pair for pair in optimizer_pairs(pairs, dtype) if "/optimizer." in pair.theirs.name]
        self.reader = PairedReader(inverted(pairs), ours)
        by_folder: dict[str, dict[str, StoredTensor]] = {}
        for name, info in self.reader.tensors.items():
            by_folder.setdefault(name.partition("/")[0], {})[name] = StoredTensor(name, info)
        self._step = state.step
        self.iteration_folder = f"iter_{state.step:07d}"
        self.files = []
        for file in layout.files:
            tensors = by_folder[layout.folder(file)]
            tree = {
                "args": arguments,
                "checkpoint_version": _VERSION,
                "iteration": state.step,
                "num_floating_point_operations_so_far": 0,
                **_models(model, layout, file, tensors),
            }
            if with_optimizer:
                tree.update(optimizer_entries(config, state, layout, file, tensors))
            num_bytes = sum(tensor.info.num_bytes for tensor in tensors.values())
            name = f"{self.iteration_folder}/{layout.folder(file)}/{FILE_NAME}"
            self.files.append(RankOutput(name, tree, num_bytes))

    def finish(self, folder: Path) -> None:
        """Write what names the iteration. Megatron-LM looks for nothing that this file does not name."""
        (folder / TRACKER).write_text(str(self._step), encoding="utf-8")
        sync(folder / TRACKER)


def write_ranks(
    folder: Path,
    ours: TensorReader,
    *,
    config: RunConfig,
    state: RunState,
    layout: RankLayout,
    with_optimizer: bool = False,
) -> Path:
    """Write a run as a checkpoint that Megatron-LM loads, see `RanksPlan`.

    Args:
        folder: of the checkpoint (`--load`); made if need be.

    Returns:
        The folder of the iteration.

    Raises:
        CheckpointError: a tensor is missing, the iteration is already there, or it cannot be written.
        ConfigError: see `RanksPlan`.
    """
    plan = RanksPlan(ours, config=config, state=state, layout=layout, with_optimizer=with_optimizer)
    path = folder / plan.iteration_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        for file in plan.files:
            (folder / file.name).parent.mkdir()
            file.write(folder / file.name, plan.reader.read, 1 << 26)
            sync((folder / file.name).parent)
        sync(path)
        plan.finish(folder)
        sync(folder)
    except FileExistsError as error:
        raise CheckpointError(f"{error.filename} is already there: remove it, or write to another folder") from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    return path


def _models(
    model: ModelConfig, layout: RankLayout, file: RankFile, tensors: Mapping[str, StoredTensor]
) -> dict[str, OrderedDict[str, StoredTensor | None]]:
    """A file's model chunks by their keys."""
    result: dict[str, OrderedDict[str, StoredTensor | None]] = {
        key: OrderedDict.fromkeys(extra_states(model, layout, chunk))
        for key, chunk in layout.chunks(model, file).items()
    }
    for name, tensor in tensors.items():
        _, key, local = name.split("/", 2)
        if key in result:
            result[key][local] = tensor
    return result


def open_ranks(path: Path) -> RanksCheckpoint:
    """Open a checkpoint of Megatron-LM's, without reading its tensors.

    Args:
        path: the folder that a run saved to (its newest iteration is taken), or that of one iteration.

    Raises:
        CheckpointError: it is not such a checkpoint, is damaged or incomplete, or of a model that ours cannot be.
    """
    path = _iteration_folder(path)
    folders = sorted(each.name for each in path.iterdir() if each.is_dir() and is_rank_folder(each.name))
    if not folders:
        raise CheckpointError(f"{path} has no folder mp_rank_XX: it is not a checkpoint of one file per rank")
    trees = {name: _object_of(path / name / FILE_NAME) for name in folders}
    first = trees[folders[0]]
    arguments = first["args"].state
    try:
        model, layout = model_of(arguments), layout_of(arguments)
        assert model.vocab_size is not None
        pairs = rank_pairs(model, model.vocab_size, layout)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    expected = {layout.folder(file) for file in layout.files}
    if expected != set(folders):
        raise CheckpointError(
            f"{path} is incomplete: its args ask for {_few(expected - set(folders)) or 'no more'}, and have no place for "
            f"{_few(set(folders) - expected) or 'none'} of its folders"
        )
    held = {
        f"{folder}/{key}/{name}": tensor
        for folder, tree in trees.items()
        for key, weights in tree.items()
        if re.fullmatch(r"model\d*", str(key)) and isinstance(weights, dict)
        for name, tensor in weights.items()
        if isinstance(tensor, LazyTensor) and not str(name).endswith("_extra_state")
    }
    _check(path, held, shapes_of(pair.theirs for pair in pairs))
    for file in layout.files:
        folder = layout.folder(file)
        held.update(held_state(path / folder / FILE_NAME, trees[folder], model, layout, file))
    iteration = first.get("iteration")
    opened = RanksCheckpoint(path, iteration if type(iteration) is int else 0, arguments, model, layout, held)
    _check(path, held, shapes_of(pair.theirs for pair in opened.pairs))
    return opened


def _iteration_folder(path: Path) -> Path:
    if not (path / TRACKER).is_file():
        if not path.is_dir():
            raise CheckpointError(f"{path} does not exist")
        return path
    text = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"\d{1,18}|release", text):
        raise CheckpointError(f"{path / TRACKER} says {text[:40]!r}, which is no iteration")
    found = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise CheckpointError(f"{found} does not exist, which {TRACKER} names")
    return found


def _object_of(path: Path) -> dict[str, Any]:
    tree = open_zip(path)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}, not what Megatron-LM saves")
    arguments = tree.get("args")
    if not isinstance(arguments, Inert) or not isinstance(arguments.state, dict):
        raise CheckpointError(f"{path} holds no args, which say what its model is")
    if tree.get("checkpoint_version") != _VERSION:
        raise CheckpointError(
            f"{path} has checkpoint_version {str(tree.get('checkpoint_version'))[:40]}: only {_VERSION} is supported"
        )
    return tree


def _check(path: Path, held: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    if wrong := set(held) ^ set(expected):
        missing = _few(set(expected) - set(held)) or "nothing"
        raise CheckpointError(
            f"{path} does not hold the weights that its args describe: {missing} is missing, and "
            f"{_few(wrong - set(expected)) or 'nothing'} is not known"
        )
    for name, shape in expected.items():
        if held[name].shape != shape:
            raise CheckpointError(f"{path}: {name} has shape {held[name].shape}, and its args ask for {shape}")


def _few(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def differing_copies(checkpoint: RanksCheckpoint, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Weights of which several ranks hold copies that are not equal to the bit: the names of both.

    Args:
        checkpoint: an opened one.
        on_bytes: told of the bytes that were compared.
    """
    first: dict[Region, Region] = {}
    found = []
    for pair in checkpoint.pairs:
        kept = first.setdefault(pair.ours, pair.theirs)
        if kept is pair.theirs:
            continue
        for part in pieces(pair.theirs, _COMPARED_ELEMENTS):
            by = tuple(a - b for a, b in zip(part.offset, pair.theirs.offset, strict=True))
            one, two = checkpoint.read(kept.shifted(by, part.shape)), checkpoint.read(part)
            if on_bytes is not None:
                on_bytes(one.nbytes + two.nbytes)
            if one.dtype != two.dtype or not one.view(-1).view(torch.uint8).equal(two.view(-1).view(torch.uint8)):
                found.append(f"{kept.name} and {pair.theirs.name}")
                break
    return found
