"""The quickstart itself, on real text: its first steps are the same on every layout that it could be run on.

Retrieval is discrete. With 8,192 selections per step, two candidates will sometimes be closer than fp32 rounding, and another layout's
rounding takes the other one; from then on the runs are two trainings of the same model, as they are after a change of seed. So every step
comes with a fingerprint of all selections: while it is the same, losses and gradient norms agree to 1e-5 (in fact to 1e-7); after that, only
closeness is asked for. The tiny models of `test_layouts.py` make too few selections to meet a tie, and agree to 1e-5 all the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.hashing import key_of, mix
from megamem.layers.layer import MemoryLayer
from pretrain.config.loader import load_config
from pretrain.config.schema import DatasetEntry, ParallelConfig, RunConfig
from pretrain.config.validate import validate

NUM_STEPS = 20
# Steps with the same selections, over all layouts together: about one in twelve meets a tie.
MIN_EQUAL_STEPS = 4
TOLERANCE = 1e-5
# Once a selection differs, of the loss.
LOOSE_TOLERANCE = 0.02
# Axes, microbatch and ranks.
LAYOUTS = {
    "1 rank": (ParallelConfig(), 4, 1),
    "pipeline 2 x virtual 2": (ParallelConfig(pipeline=2, virtual_pipeline=2), 4, 2),
    "tensor 2 x pipeline 2": (ParallelConfig(tensor=2, pipeline=2), 4, 4),
    "tensor 2 x data 2": (ParallelConfig(tensor=2), 4, 4),
    "pipeline 2 x data 2": (ParallelConfig(pipeline=2), 2, 4),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenth of the default corpus, with a tokenizer of the quickstart's size."""
    from pretrain.data.prepare import prepare
    from pretrain.data.sources import PYTHON_STDLIB, list_files, read_documents
    from pretrain.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("quickstart")
    files = [str(file.path) for file in itertools.islice(list_files([PYTHON_STDLIB]), 0, None, 10)]
    texts = (document.text for document in read_documents(files))
    tokenizer = train_bpe(texts, 4096, folder / "tokenizer.json", progress=False)
    prepare(files, folder / "data", tokenizer, validation_fraction=0.1, num_workers=1, max_bad=0, progress=False)
    return folder / "data"


@pytest.fixture(scope="module")
def quickstart(dataset: Path, pytestconfig: pytest.Config) -> RunConfig:
    config = load_config(pytestconfig.rootpath / "configs" / "quickstart.yaml")
    return replace(config, data=replace(config.data, datasets=(DatasetEntry(str(dataset)),)))


@dataclass(frozen=True)
class Step:
    """What one step came to."""

    loss: float
    grad_norm: float
    selections: int
    """Sum of hashes of (layer, slot) over all retrieved slots of all tokens: equal if and, but for collisions, only if those are."""


class Selections:
    """Adds up hashes of what this rank's layers retrieve."""

    def __init__(self, layers: list[MemoryLayer]) -> None:
        self.total = torch.zeros(1, dtype=torch.int64)
        for layer in layers:
            layer.locate = partial(self._record, layer.locate, key_of(0, layer.name))  # type: ignore[method-assign]

    def _record(self, locate: Callable[[Tensor], Any], key: int, slots: Tensor) -> Any:
        self.total += mix(slots, key).sum()
        return locate(slots)

    def take(self) -> int:
        """The sum over all ranks since the last call. Every token of every layer is on exactly one rank."""
        torch.distributed.all_reduce(self.total)
        value = int(self.total)
        self.total.zero_()
        return value


def _first_steps(config: RunConfig, folder: Path) -> list[Step]:
    """The first steps of a run, in the world that is already joined."""
    from parallel.cpu import cuda_on_cpu
    from parallel.groups import initialise_groups
    from pretrain.megatron import parallel_sizes
    from pretrain.run import RunFolder, open_run
    from pretrain.schedule import apply_schedule
    from pretrain.step import train_step, unwrap

    with cuda_on_cpu():
        groups = initialise_groups(
            parallel_sizes(config), device=torch.device("cpu"), timeout_minutes=5, seed=config.seed
        )
        run = open_run(config, RunFolder(folder), groups)
        selections = Selections([layer for chunk in run.chunks for layer in unwrap(chunk).memory_layers])
        batches, history = run.batches(), []
        for step in range(NUM_STEPS):
            apply_schedule(run.optimizer.param_groups, step, config.optimizer, config.train)
            result = train_step(
                run.chunks,
                run.optimizer,
                batches,
                groups,
                num_microbatches=run.num_microbatches,
                micro_batch_size=config.train.micro_batch_size,
                sequence_length=config.train.sequence_length,
            )
            history.append(Step(result.loss.mean, result.grad_norm, selections.take()))
        return history


def test_the_first_steps_are_those_of_one_rank(
    quickstart: RunConfig, tmp_path: Path, run_ranks: Callable[..., list[list[Step]]]
) -> None:
    histories: dict[str, list[Step]] = {}
    for name, (layout, micro_batch_size, num_ranks) in LAYOUTS.items():
        config = replace(
            quickstart, parallel=layout, train=replace(quickstart.train, micro_batch_size=micro_batch_size)
        )
        validate(config, num_ranks)
        folder = tmp_path / name.replace(" ", "_")
        histories[name] = run_ranks(partial(_first_steps, config, folder), num_ranks, timeout_s=600)[0]
    reference = histories.pop("1 rank")
    assert reference[-1].loss < reference[0].loss - 0.3, "twenty steps of the quickstart must learn something"
    num_all_equal = 0
    for name, history in histories.items():
        num_equal = 0
        while num_equal < NUM_STEPS and history[num_equal].selections == reference[num_equal].selections:
            num_equal += 1
        print(f"{name}: the same selections in {num_equal} of {NUM_STEPS} steps")
        num_all_equal += num_equal
        for number, (here, there) in enumerate(zip(history, reference, strict=True)):
            exact = number < num_equal
            assert here.loss == pytest.approx(there.loss, rel=TOLERANCE if exact else LOOSE_TOLERANCE), (name, number)
            if exact:
                assert here.grad_norm == pytest.approx(there.grad_norm, rel=TOLERANCE), (name, number)
    assert num_all_equal >= MIN_EQUAL_STEPS, "selections differ far more often than ties can explain"
