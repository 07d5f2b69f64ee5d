"""A whole run on a corpus of Python source: its first eight steps are the same on every layout.

Retrieval is discrete. Where the last candidate taken and the first one left out are closer than fp32 rounding, another
layout's rounding takes the other one, and from then on the runs are two trainings of the same model, as after a change
of seed. No seed is safe from that on every machine, since the corpus is the running Python's own library and rounding
is its processor's. So the test tells a tie from a fault. It compares what every token selects in every layer. Losses
and gradient norms must agree to 1e-5 in all steps for as long as all 8,192 selections of a step do; in the first layer
where some part, each of those must be one that a little noise changes on one rank, too. (Later layers of that step read
what the first one wrote, and may part further.)
"""

from __future__ import annotations

import itertools
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common.hashing import mix
from megamem.banks.hashing import key_of
from megamem.layers.layer import MemoryLayer
from megamem.layers.retrieval import Retrieved
from pretrain.config.schema import DatasetEntry, ParallelConfig, RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from tests.rotation import named_in_rotation

NUM_STEPS = 8
TOLERANCE = 1e-5
# Tolerance of the loss, once a tie has parted two runs.
LOOSE_TOLERANCE = 0.02
# Relative noise on a retrieval's input, about ten times what layouts differ by. One selection in some thousand hangs on
# it.
ROUNDING = 1e-5
NUM_DRAWS = 8
# Axes, microbatch and ranks.
LAYOUTS = {
    "1 rank": (ParallelConfig(), 4, 1),
    **named_in_rotation(
        {
            "tensor 2 x pipeline 2": (ParallelConfig(tensor=2, pipeline=2), 4, 4),
            "pipeline 2 x virtual 2 x data 2": (ParallelConfig(pipeline=2, virtual_pipeline=2), 2, 4),
        },
        2,
    ),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a corpus of the standard library's modules from a to m that are files."""
    from pretrain.data.prepare import prepare
    from pretrain.data.sources import read_documents
    from pretrain.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("equal_steps")
    sources = [str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))]
    texts = read_documents(sources)
    tokenizer = train_bpe(texts, 4096, folder / "tokenizer.json")
    prepare(sources, folder / "data", tokenizer, validation_fraction=0.05)
    return folder / "data"


@pytest.fixture(scope="module")
def config(dataset: Path) -> RunConfig:
    config = load_config(Path(__file__).with_name("equal_steps.yaml"))
    return replace(config, data=replace(config.data, datasets=(DatasetEntry(str(dataset)),)))


@dataclass(frozen=True)
class Step:
    """Figures of one step."""

    loss: float
    grad_norm: float
    selections: tuple[Counter[int], ...]
    """Hashes of the entries of every token, on whatever rank, by layer."""
    ties: tuple[frozenset[int], ...]
    """Hashes, of those, that noise changes, by layer."""


class Selections:
    """Watches what this rank's layers retrieve, and which selections hang on rounding."""

    def __init__(self, layers: list[MemoryLayer], num_draws: int) -> None:
        self.num_draws = num_draws
        self.seen: list[tuple[str, Tensor, Tensor]] = []
        self.generator = torch.Generator().manual_seed(0)
        for layer in layers:
            layer.retrieve = partial(self._record, layer.retrieve, layer.name)  # type: ignore[method-assign]

    def _record(self, retrieve: Callable[[Tensor], Retrieved], name: str, x: Tensor) -> Retrieved:
        found = retrieve(x)
        with torch.no_grad():
            hashes = self._hashes(found)
            is_tie = torch.zeros_like(hashes, dtype=torch.bool)
            for _ in range(self.num_draws):
                noise = ROUNDING * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
                is_tie |= self._hashes(retrieve(x * (1 + noise))) != hashes
        self.seen.append((name, hashes, is_tie))
        return found

    @staticmethod
    def _hashes(found: Retrieved) -> Tensor:
        """[T]: of each token's entries, whatever their order."""
        return mix(found.entries.flatten(1), key_of(0, "entries")).sum(1)

    def take(self) -> tuple[tuple[Counter[int], ...], tuple[frozenset[int], ...]]:
        """Records of all ranks since the last call, by layer. Every token of every layer is on exactly one rank."""
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self.seen)
        self.seen = []
        selections: dict[str, Counter[int]] = {}
        ties: dict[str, set[int]] = {}
        for name, hashes, is_tie in itertools.chain.from_iterable(everyone):
            selections.setdefault(name, Counter()).update(hashes.tolist())
            ties.setdefault(name, set()).update(hashes[is_tie].tolist())
        names = sorted(selections)
        return tuple(selections[name] for name in names), tuple(frozenset(ties[name]) for name in names)


def _first_steps(config: RunConfig, folder: Path) -> list[Step]:
    """The first steps of a run, in the world that is already joined."""
    from parallel.groups import initialise_groups
    from parallel.machine.cpu import cuda_on_cpu
    from pretrain.engine.chunks import unwrap
    from pretrain.engine.megatron import parallel_sizes
    from pretrain.run.folder import RunFolder
    from pretrain.train.loop import take_step
    from pretrain.train.run import open_run

    with cuda_on_cpu():
        groups = initialise_groups(
            parallel_sizes(config), device=torch.device("cpu"), timeout_minutes=5, seed=config.seed
        )
        run = open_run(config, RunFolder(folder), groups)
        layers = [layer for chunk in run.chunks for layer in unwrap(chunk).memory_layers]
        # Ties are sought where the others are compared with.
        selections = Selections(layers, NUM_DRAWS if groups.world_size == 1 else 0)
        batches, history = run.batches(), []
        for _ in range(NUM_STEPS):
            result, _row = take_step(run, batches)
            history.append(Step(result.loss.mean, result.norms.main, *selections.take()))
        return history


def test_the_first_steps_are_those_of_one_rank(
    config: RunConfig, tmp_path: Path, run_ranks: Callable[..., list[list[Step]]]
) -> None:
    histories: dict[str, list[Step]] = {}
    for name, (layout, micro_batch_size, num_ranks) in LAYOUTS.items():
        of_layout = replace(config, parallel=layout, train=replace(config.train, micro_batch_size=micro_batch_size))
        validate(of_layout, num_ranks)
        folder = tmp_path / name.replace(" ", "_")
        histories[name] = run_ranks(partial(_first_steps, of_layout, folder), num_ranks, timeout_s=600)[0]
    reference = histories.pop("1 rank")
    print("LOSSES", [round(x.loss, 3) for x in reference])
    assert reference[-1].loss < reference[0].loss - 0.3, "eight steps must learn something"
    for name, history in histories.items():
        num_equal = 0
        while num_equal < NUM_STEPS and history[num_equal].selections == reference[num_equal].selections:
            num_equal += 1
        print(f"{name}: the same selections in {num_equal} of {NUM_STEPS} steps")
        if num_equal < NUM_STEPS:
            here, there = history[num_equal], reference[num_equal]
            layer = next(i for i, found in enumerate(there.selections) if found != here.selections[i])
            parted = there.selections[layer] - here.selections[layer]
            decided = {selection for selection in parted if selection not in there.ties[layer]}
            print(f"{name}: {parted.total()} selections of layer {layer} part in step {num_equal + 1}")
            assert not decided, f"{name}: {len(decided)} of {parted.total()} selections that part are no ties"
        for number, (here, there) in enumerate(zip(history, reference, strict=True)):
            exact = number < num_equal
            assert here.loss == pytest.approx(there.loss, rel=TOLERANCE if exact else LOOSE_TOLERANCE), (name, number)
            if exact:
                assert here.grad_norm == pytest.approx(there.grad_norm, rel=TOLERANCE), (name, number)
