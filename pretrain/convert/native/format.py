"""Our own checkpoints: Megatron's `torch_dist` files with a `state.json`, in the folder of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from parallel.machine.atomic_write import sync
from pretrain.checkpoint.derived import SCALE_PREFIX, derived_weights, main_name, scales_in
from pretrain.checkpoint.folder import (
    SavedState,
    complete,
    package_versions,
    step_folder,
    writing_folder,
)
from pretrain.checkpoint.hashes import RecordedFile, record
from pretrain.checkpoint.store.files import WrittenFile
from pretrain.checkpoint.store.selected import Joined, Selected
from pretrain.checkpoint.store.tensors import TensorInfo, TensorReader
from pretrain.checkpoint.store.torch_dist import open_torch_dist
from pretrain.checkpoint.store.torch_dist_writer import TorchDistFile, pack, parts_of, write_index
from pretrain.config.loader import to_dict, to_yaml
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.updates import STATE_PREFIX
from pretrain.convert.format import ConversionTarget, OpenedCheckpoint
from pretrain.convert.listing import is_native, native_at
from pretrain.convert.names import NATIVE
from pretrain.data.manifest import open_saved_tokenizer, save_tokenizer
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import saved_config

_SPLIT_BY_COLUMNS = ("mlp.linear_fc2.weight", "ffn.linear_fc2.weight", "self_attention.linear_proj.weight")
"""Weights that tensor parallelism splits along their second dimension; the others it splits by rows, or not."""


class NativeFormat:
    """See `CheckpointFormat`."""

    name = NATIVE
    takes_config = False
    holds_optimizer = True

    def is_at(self, path: Path) -> bool:
        return is_native(path)

    def open(self, path: Path, step: int | None, config: RunConfig | None) -> OpenedCheckpoint:
        saved, folder = native_at(path, step)
        stored = open_torch_dist(saved.path)
        return OpenedCheckpoint(
            path=saved.path,
            format_name=self.name,
            reader=_with_derived_weights(stored, saved),
            config=saved_config(saved, None),
            state=saved.run,
            saved=saved,
            tokenizer=open_saved_tokenizer(folder.tokenizer) if folder.tokenizer.is_dir() else None,
        )

    def convert(self, source: OpenedCheckpoint, target: ConversionTarget) -> NativeConversion:
        return NativeConversion(source, target)


class NativeConversion:
    """See `Conversion`. The folder is a run's, which `megamem train` goes on with."""

    def __init__(self, source: OpenedCheckpoint, target: ConversionTarget) -> None:
        self._source = source
        self._config = _for_target(source.config, target)
        weights = source.weights_in(target.dtype)
        names = dict.fromkeys([*weights.tensors, *(source.optimizer_state if target.with_optimizer else ())])
        # Weights that main weights determine are not stored twice.
        stored = [name for name in names if main_name(name) not in names]
        self.reader = Joined(weights, source.reader, stored)
        # Without moments, AdamW has seen no update.
        self._state = source.state if target.with_optimizer else source.state.without_moments()
        # The folder that a run writes a checkpoint in before it has its name.
        self._inside = writing_folder(RunFolder(Path()).checkpoints, self._state.step)
        self.files = _files(
            f"{self._inside}/", self.reader.tensors, self._config.parallel, max_file_bytes=target.max_file_bytes
        )

    def finish(self, folder: Path, written: Sequence[WrittenFile]) -> None:
        run, state, path = RunFolder(folder), self._state, folder / self._inside
        write_index(path, self.reader.tensors, self.files, written)
        recorded = {Path(file.name).name: RecordedFile(file.num_bytes, file.notes["sha256"]) for file in written}
        for file in path.iterdir():
            if file.name not in recorded:
                sync(file)
                recorded[file.name] = record(file)
        complete(
            run.checkpoints,
            state.step,
            recorded,
            run=asdict(state),
            rng={"seed": self._config.seed, "step": state.step},
            config=to_dict(self._config),
            versions=package_versions(),
            weights_dtype="bfloat16" if self._config.train.precision == "bf16" else "float32",
        )
        run.config.write_text(to_yaml(self._config), encoding="utf-8")
        if self._source.tokenizer is not None:
            save_tokenizer(self._source.tokenizer, run.tokenizer)

    def reopen(self, folder: Path) -> TensorReader:
        return open_torch_dist(step_folder(RunFolder(folder).checkpoints, self._state.step))


def _for_target(config: RunConfig, target: ConversionTarget) -> RunConfig:
    """The configuration of a run that goes on from the conversion."""
    layout, before = target.layout, config.parallel
    parallel = replace(
        before,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        memory=layout.memory,
        memory_rows=math.gcd(layout.memory, before.memory_rows),
        # Another number of chunks would need another one.
        pipeline_layout=before.pipeline_layout
        if (before.pipeline, before.virtual_pipeline) == (layout.pipeline, layout.virtual_pipeline)
        else None,
    )
    config = replace(config, parallel=parallel)
    if target.dtype is None:
        return config
    return replace(config, train=replace(config.train, precision="bf16" if target.dtype is torch.bfloat16 else "fp32"))


def _with_derived_weights(stored: TensorReader, saved: SavedState) -> Selected:
    """All tensors, those too that follow from fp32 main weights, and instead of scales what they are of."""
    derived, scales = derived_weights(stored.tensors), scales_in(stored)
    names = {**{name: name for name in stored.tensors if not name.startswith(SCALE_PREFIX)}, **derived}
    factors = {name: scale for weight, scale in scales.items() for name in (weight, main_name(weight))}
    return Selected(stored, names, dict.fromkeys(derived, getattr(torch, saved.weights_dtype or "float32")), factors)


def _files(
    folder: str, tensors: Mapping[str, TensorInfo], layout: ParallelConfig, *, max_file_bytes: int
) -> list[TorchDistFile]:
    """Tables, matrices and optimizer state, each cut as the layout's ranks cut them."""
    parts = [
        part
        for name, info in sorted(tensors.items())
        for part in parts_of(name, info, _columns(name, layout) if len(info.shape) > 1 else 1)
    ]
    return pack(f"{folder}__0", parts, tensors, max_file_bytes)


def _columns(name: str, layout: ParallelConfig) -> int:
    """Groups of columns in which a tensor, or its optimizer state, is held by ranks."""
    weight = name.split(".", 3)[3] if name.startswith(STATE_PREFIX) else name
    if weight.startswith("banks."):
        return layout.memory_columns
    return layout.tensor if weight.endswith(_SPLIT_BY_COLUMNS) else 1
