"""A run that goes on draws no initial weights, and no element of it stays what the memory held before."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_moe import MOE
from tiny_runs import PRIVATE, SHARED, TinyRun, on, save_run, tiny_run
from torch.distributed.checkpoint.metadata import Metadata

from megamem.model import MemoryGPTModel
from pretrain.checkpoint.folder import STATE_FILE, read_state
from pretrain.checkpoint.run_entries import load_weights, restore_run
from pretrain.config.schema import RunConfig
from pretrain.engine import build
from pretrain.engine.build import build_chunks, build_unset_chunks
from pretrain.errors import CheckpointError
from pretrain.state import RunState
from tests.rotation import in_rotation

STATE = RunState(step=2, consumed_samples=16, consumed_tokens=256, num_updates=2)
SAVED = "step_00000002"

assert SHARED.model.memory is not None
CASES: dict[str, tuple[RunConfig, int]] = {
    "fp32": (SHARED, 1),
    "bf16, data 2": (replace(SHARED, train=replace(SHARED.train, precision="bf16")), 2),
    "stored shuffle, tensor 2": (
        on(
            replace(SHARED, model=replace(SHARED.model, memory=replace(SHARED.model.memory, shuffle="table"))), tensor=2
        ),
        2,
    ),
    "interleaved, untied": (on(PRIVATE, pipeline=2, virtual_pipeline=2, micro_batch_size=1), 2),
    "tables in host memory": (replace(SHARED, optimizer=replace(SHARED.optimizer, value_offload="cpu")), 1),
    "experts": (MOE, 1),
}


def poison(chunks: list[MemoryGPTModel]) -> None:
    for chunk in chunks:
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else -(2**31))


def poisoned(*arguments: Any, **keywords: Any) -> list[MemoryGPTModel]:
    """Unset weights at their worst."""
    chunks = build_unset_chunks(*arguments, **keywords)
    poison(chunks)
    return chunks


def everything(run: TinyRun) -> dict[str, torch.Tensor]:
    """Every tensor that a step reads: weights, buffers, main weights and moments."""
    found = {}
    for index, bare in enumerate(run.bare):
        for name, tensor in (*bare.named_parameters(), *bare.named_buffers()):
            found[f"{index}.{name}"] = tensor.detach().clone()
    model = {f"model{index}": bare.sharded_state_dict() for index, bare in enumerate(run.bare)}
    for name, entry in run.optimizer.sharded_state_dict(model).items():
        found[name] = entry.data.detach().clone()
    return found


@pytest.mark.parametrize("name", in_rotation(list(CASES), 2))
def test_a_restored_run_has_every_bit_from_the_checkpoint(run_ranks: Any, tmp_path: Path, name: str) -> None:
    config, num_ranks = CASES[name]

    def main() -> tuple[list[str], list[tuple[float, float]], list[tuple[float, float]]]:
        with tiny_run(config) as run:
            run.train(2)
            run.save(tmp_path)
            expected = everything(run)
            after = run.train(2)
        # Whoever draws weights now fails.
        build.initialise = None  # type: ignore[assignment]
        with tiny_run(config, build_model=poisoned) as run:
            run.resume(tmp_path / SAVED)
            restored = everything(run)
            assert restored.keys() == expected.keys()
            different = [key for key in expected if not torch.equal(restored[key], expected[key])]
            return different, run.train(2), after

    for different, actual, expected in run_ranks(main, num_ranks, timeout_s=300):
        assert not different
        assert actual == expected


def test_weights_alone_fill_a_chunk(run_ranks: Any, tmp_path: Path) -> None:
    """Evaluation and generation load them so, with the singular vectors that no step refreshes there."""

    def main() -> list[str]:
        with tiny_run(SHARED) as run:
            run.train(2)
            save_run(SHARED, STATE, run.chunks, run.optimizer, tmp_path)
            expected = {name: t.clone() for name, t in (*run.bare[0].named_parameters(), *run.bare[0].named_buffers())}
        with tiny_run(SHARED, build_model=poisoned) as run:
            load_weights(tmp_path / SAVED, run.bare)
            actual = dict((*run.bare[0].named_parameters(), *run.bare[0].named_buffers()))
            return [name for name in expected if not torch.equal(actual[name], expected[name])]

    assert run_ranks(main, 1) == [[]]


def test_format_1_is_restored_with_its_own_copy_of_the_weights(run_ranks: Any, tmp_path: Path) -> None:
    """Format 1 has sizes in place of hashes, and all weights besides the main weights."""
    config = replace(SHARED, checkpoint=replace(SHARED.checkpoint, weights_copy=True))

    def main() -> list[str]:
        with tiny_run(config) as run:
            run.train(2)
            path = run.save(tmp_path)
            expected = everything(run)
        state = json.loads((path / STATE_FILE).read_text())
        del state["sha256"], state["weights_dtype"]
        sizes = {name: entry["bytes"] for name, entry in state["files"].items()}
        (path / STATE_FILE).write_text(json.dumps({**state, "format": 1, "files": sizes}))
        with tiny_run(replace(config, seed=99)) as run:
            load_weights(path, run.bare)
            weights = {f"0.{name}": tensor.detach().clone() for name, tensor in run.bare[0].named_parameters()}
        with tiny_run(config, build_model=poisoned) as run:
            run.resume(path)
            restored = everything(run)
        assert weights.keys() <= restored.keys() == expected.keys()
        return [key for key in expected if not torch.equal({**restored, **weights}[key], expected[key])]

    assert run_ranks(main, 1) == [[]]


def test_unset_weights_refuse_to_train(run_ranks: Any) -> None:
    def main() -> None:
        with (
            tiny_run(SHARED, build_model=build_unset_chunks) as run,
            pytest.raises(AssertionError, match="neither initial"),
        ):
            run.train(1)
        with tiny_run(SHARED, build_model=build_chunks) as run:
            run.train(1)

    run_ranks(main, 1)


def without(key: str) -> Callable[[Metadata], None]:
    return lambda index: index.state_dict_metadata.__delitem__(key)


def without_a_part(key: str) -> Callable[[Metadata], None]:
    return lambda index: index.state_dict_metadata[key].chunks.pop()  # type: ignore[union-attr]


def of_another_size(key: str) -> Callable[[Metadata], None]:
    def change(index: Metadata) -> None:
        entry: Any = index.state_dict_metadata[key]
        entry.size = torch.Size((entry.size[0] + 1, *entry.size[1:]))

    return change


QKV = "decoder.layers.3.self_attention.linear_qkv.weight"
DAMAGES = {
    "no weights": (
        without("optimizer.state.param.banks.1.values"),
        "has no tensor optimizer.state.param.banks.1.values",
    ),
    "no buffer": (without("decoder.layers.2.mlp.memory.u"), "has no tensor decoder.layers.2.mlp.memory.u"),
    "no moments": (without("optimizer.state.exp_avg.banks.0.values"), "has no tensor optimizer.state.exp_avg.banks.0"),
    "a hole in a weight": (without_a_part(f"optimizer.state.param.{QKV}"), r"\d+ elements of optimizer.state.param"),
    "a hole in a moment": (without_a_part(f"optimizer.state.exp_avg.{QKV}"), r"\d+ elements of optimizer.state.exp"),
    "another size": (
        of_another_size("optimizer.state.param.banks.1.values"),
        r"banks.1.values has the shape \(289, 16\), and not \(288, 16\)",
    ),
}


def test_a_checkpoint_with_a_hole_is_refused_on_every_rank(run_ranks: Any, tmp_path: Path) -> None:
    config = on(SHARED, tensor=2)

    def main() -> list[str]:
        with tiny_run(config) as run:
            run.train(2)
            save_run(config, STATE, run.chunks, run.optimizer, tmp_path)
        index_file = tmp_path / SAVED / ".metadata"
        index = index_file.read_bytes()
        saved = read_state(tmp_path / SAVED)
        messages = []
        for damage, _ in DAMAGES.values():
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                damaged = pickle.loads(index)
                damage(damaged)
                index_file.write_bytes(pickle.dumps(damaged))
            torch.distributed.barrier()
            with tiny_run(config, build_model=poisoned) as run, pytest.raises(CheckpointError) as refused:
                restore_run(saved, run.chunks, run.optimizer)
            messages.append(str(refused.value))
            assert not any(bare.weights_are_set for bare in run.bare)
        return messages

    for messages in run_ranks(main, 2, timeout_s=300):
        for message, (_, expected) in zip(messages, DAMAGES.values(), strict=True):
            with pytest.raises(CheckpointError, match=expected):
                raise CheckpointError(message)
