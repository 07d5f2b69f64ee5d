"""Checkpoints of one layout load on every other one: weights and optimizer state, bit for bit.

A checkpoint is loaded over weights that are no numbers on the target layout and saved again from there: the two checkpoints
must hold the same tensors. That compares every element of every global tensor, whichever ranks own it. A checkpoint's
tensors are global and know no layout, so that every layout writes once and reads once per model: pairs of layouts add
nothing to that. The weights are written besides the main weights, which have to determine them: a run without that
copy saves the same without them, and gives the same weights.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from hidden_matrices import is_matrix
from tiny_runs import PRIVATE, SHARED, on, save_run, tiny_run
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pretrain.checkpoint.derived import derived_weights
from pretrain.config.schema import RunConfig
from pretrain.state import RunState
from tests.rotation import in_rotation

TIED = replace(PRIVATE, model=replace(PRIVATE.model, tied_embeddings=True))
"""Every layer may be a chunk, and the first and last stage hold copies of one embedding."""

DENSE = replace(TIED, model=replace(TIED.model, memory=None))

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor 2 x data 2": {"tensor": 2},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
    "pipeline 2 x data 2, interleaved": {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 2},
    "pipeline 4": {"pipeline": 4},
    "data 4 x memory 2": {"memory": 2, "micro_batch_size": 2},
    "context 2 x data 2 x memory 4, 2 of rows": {"context": 2, "memory": 4, "memory_rows": 2},
    "tensor 2 x pipeline 2 x memory 2": {"tensor": 2, "pipeline": 2, "memory": 2},
}

CASES: dict[str, tuple[RunConfig, tuple[str, ...]]] = {
    "shared tables": (
        SHARED,
        (
            "tensor 2 x data 2",
            "context 2 x data 2 x memory 4, 2 of rows",
            "data 4 x memory 2",
            "tensor 2 x pipeline 2 x memory 2",
        ),
    ),
    "untied, two heads, muon": (
        replace(PRIVATE, optimizer=replace(PRIVATE.optimizer, matrices="muon")),
        ("tensor 2 x pipeline 2", "pipeline 4", "pipeline 2 x data 2, interleaved"),
    ),
    "dense": (DENSE, ("tensor 2 x pipeline 2", "pipeline 2 x data 2, interleaved")),
    "tied, bf16, tables by row": (
        replace(
            TIED,
            train=replace(TIED.train, precision="bf16"),
            optimizer=replace(TIED.optimizer, tables="row_wise"),
        ),
        (
            "pipeline 2 x data 2, interleaved",
            "context 2 x data 2 x memory 4, 2 of rows",
            "tensor 2 x pipeline 2 x memory 2",
        ),
    ),
}
"""Models, and layouts of which each reads what the one before it has written. Stages cannot split a shared table."""

STATE = RunState(step=1, consumed_samples=8, consumed_tokens=128, num_updates=1)
"""State after a step, which gives all moments."""


def with_weights(config: RunConfig) -> RunConfig:
    return replace(config, checkpoint=replace(config.checkpoint, weights_copy=True))


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = torch_checkpoint.FileSystemReader(path)
    state = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        dtype = entry.properties.dtype
        # A hole would show.
        hole = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        state[name] = torch.full(entry.size, hole, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("case", in_rotation(list(CASES)))
def test_every_layout_loads_what_another_one_saved(run_ranks: Any, tmp_path: Path, case: str) -> None:
    """Save on every layout; load on the next one what it has saved, and save it again."""
    config, layouts = CASES[case]
    pairs = list(pairwise((*layouts, layouts[0])))

    def main() -> list[list[float]]:
        losses = []
        # Every layout saves what it has trained itself. The first goes on: what the others do is held against that.
        for name in layouts:
            with tiny_run(on(config, **LAYOUTS[name])) as run:
                run.train(1)
                run.save(tmp_path / name)
                save_run(with_weights(config), STATE, run.chunks, run.optimizer, tmp_path / f"{name} with weights")
                if not losses:
                    losses.append([number for row in run.train(2) for number in row])
        # Each loads what another one saved, over weights that are no numbers, saves it again, and trains on.
        for source, target in pairs:
            with tiny_run(on(config, **LAYOUTS[target])) as run:
                for parameter in (each for chunk in run.bare for each in chunk.parameters()):
                    parameter.data.fill_(torch.nan)
                run.resume(tmp_path / source / "step_00000001")
                assert run.run.state == STATE
                copied = tmp_path / f"{source} to {target}"
                save_run(with_weights(config), STATE, run.chunks, run.optimizer, copied)
                # The second loss depends on the moments, too.
                losses.append([number for row in run.train(2) for number in row])
        dist.barrier()
        return losses

    losses = run_ranks(main, 4, timeout_s=300)[0]
    for source, target in pairs:
        alone = read_all(tmp_path / source / "step_00000001")
        written = read_all(tmp_path / f"{source} with weights" / "step_00000001")
        derived = derived_weights(alone)
        assert alone.keys() == written.keys() - derived.keys()
        assert derived == {name: f"optimizer.state.param.{name}" for name in written.keys() - alone.keys()}
        assert not [name for name in alone if not torch.equal(alone[name], written[name])]
        rewritten = read_all(tmp_path / f"{source} to {target}" / "step_00000001")
        assert written.keys() == rewritten.keys()
        assert not [name for name in written if torch.isnan(written[name].float()).any()]
        different = [name for name in written if not torch.equal(written[name], rewritten[name])]
        assert not different, f"{source} -> {target}"
        check_contents(config, written)
    exact = config.train.precision == "fp32"
    for row in losses:
        # In bf16 a rounding changes which rows are read, and with them the gradients.
        compared = slice(None) if exact else slice(None, None, 2)
        assert row[compared] == pytest.approx(losses[0][compared], rel=1e-5 if exact else 2e-2)


def check_contents(config: RunConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Weights, main weights and both moments of every parameter, in the weights' global shape; of tables that are updated
    by row, a moment per row and its last update, and no main weights but themselves; of matrices that Muon updates, one moment; and the
    buffers, which have no moments.
    """
    state_prefix = "optimizer.state.param."
    weights = {name.removeprefix(state_prefix) for name in tensors if name.startswith(state_prefix)}
    buffers = {name for name in tensors if not name.startswith("optimizer.")} - weights
    assert {name.rsplit(".", 2)[1] for name in buffers} <= {"memory"}
    by_row = {name for name in weights if name.endswith("values")} if config.optimizer.tables == "row_wise" else set()
    by_muon = {name for name in weights if is_matrix(name)} if config.optimizer.matrices == "muon" else set()
    kept = {
        name: ("row_last_update", "row_exp_avg_sq")
        if name in by_row
        else ("momentum",)
        if name in by_muon
        else ("exp_avg", "exp_avg_sq")
        for name in weights
    }
    for name in weights:
        main = tensors[f"optimizer.state.param.{name}"]
        assert torch.equal(main.to(tensors[name].dtype), tensors[name])
        assert main.dtype == (tensors[name].dtype if name in by_row else torch.float32)
        for part in kept[name]:
            state = tensors[f"optimizer.state.{part}.{name}"]
            assert state.shape == tensors[name].shape[: 1 if name in by_row else None]
            assert state.dtype == torch.float32
    assert len(tensors) == 4 * len(weights) - len(by_muon) + len(buffers)
    tables = [name for name in weights if name.endswith("values")]
    assert bool(tables) == (config.model.memory is not None)
    moved = [name for name in weights if tensors[f"optimizer.state.{kept[name][-1]}.{name}"].any()]
    assert len(moved) == len(weights)
