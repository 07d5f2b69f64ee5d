"""The training loop around stand-ins that write down what is asked of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain.train.callbacks as callbacks_module
import pretrain.train.loop as loop
import pretrain.train.run as run_module
from pretrain.config.schema import RunConfig
from pretrain.evaluation.evaluate import Evaluation, EvaluationStopped
from pretrain.run.folder import RunFolder
from pretrain.state import RunState
from pretrain.train.run import Run
from tests.unit.loop.world import CONFIG, DATA_RANK, DATA_SIZE, START, WORLD_SIZE, Samples, SaverDouble, World


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a `World` from a configuration and a state."""
    # A signal that the loop does not take must fail a test, not end the session.
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}

    def make(config: RunConfig = CONFIG, state: RunState = START, is_main: bool = True) -> World:
        nothing: Any = None
        groups: Any = SimpleNamespace(
            is_main=is_main,
            rank=0 if is_main else 1,
            data_size=DATA_SIZE,
            data_rank=DATA_RANK,
            world_size=WORLD_SIZE,
            device=torch.device("cpu"),
            megatron=SimpleNamespace(tp_dp_cp="the stage"),
        )
        names = ("backbone", "backbone_no_decay", "retrieval", "experts", "values", "pre_values")
        optimizer: Any = SimpleNamespace(param_groups=[{"name": name} for name in names])
        chunks: Any = [SimpleNamespace(), SimpleNamespace()]
        run = Run(config, RunFolder(tmp_path), groups, nothing, Samples(), "held out", chunks, optimizer, state, 1e12)  # type: ignore[arg-type]
        world = World(run)
        run.saver = SaverDouble(world.log, config, tmp_path / "checkpoints")

        def entries(config: RunConfig, chunks: Any, optimizer: Any) -> str:
            assert (config, chunks, optimizer) == (run.config, run.chunks, run.optimizer)
            assert world.weights_are_complete
            return f"entries of {run.state.step}"

        def evaluate(*arguments: Any, **keywords: Any) -> Evaluation:
            assert arguments == (run.chunks, run.held_out, run.groups)
            stopped = keywords.pop("stopped")
            for number in range(1, 4):
                if stopped():
                    world.log.append(f"evaluation {run.state.step} left in pass {number}")
                    raise EvaluationStopped
                if (run.state.step, number) == world.asked_in_evaluation:
                    os.kill(os.getpid(), signal.SIGTERM)
            assert keywords == {"micro_batch_size": config.train.micro_batch_size, "pipeline": 2}
            world.log.append(f"evaluate {run.state.step}")
            return Evaluation(1.5, 2.5, 3, 4)

        class Collector:
            def __init__(self, layers: Any, **keywords: Any) -> None:
                assert keywords["stage_group"] == "the stage"

            def start(self) -> None:
                world.log.append("observe")

            def finish(self) -> dict[int, dict[str, float]]:
                assert world.weights_are_complete
                world.log.append("observed")
                return {3: {"coverage": 0.25}}

        # One rank: what it was told is what all know.
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
        monkeypatch.setattr(loop, "train_step", world.step)
        monkeypatch.setattr(loop, "seed_step", lambda seed, step: world.log.append(f"seed {seed} {step}"))
        monkeypatch.setattr(run_module, "entries_to_save", entries)
        monkeypatch.setattr(run_module, "complete_weights", world.complete_weights)
        monkeypatch.setattr(callbacks_module, "evaluate", evaluate)
        monkeypatch.setattr(callbacks_module, "UsageCollector", Collector)
        monkeypatch.setattr(callbacks_module, "unwrap", lambda chunk: SimpleNamespace(memory_layers=[]))
        return world

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)
