"""Tables in files train as tables on the device do, to the bit: losses, norms, weights and state."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from test_checkpoint_layouts import read_all
from test_layouts import shards
from test_read_rows import LAYOUTS as LAYOUTS_OF_ROWS
from test_read_rows import MODELS, REPLICAS, Trained, config_of, differences
from tiny_runs import VOCAB_SIZE, TinyRun, build, joined, on

from megamem.attention.documents import document_positions
from megamem.config.model import ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.placement.spans import PlacementConfig
from parallel.groups import ParallelGroups
from parallel.processes.rank_errors import RankError
from pretrain.checkpoint.write_plan import plan_writes
from pretrain.config.schema import CheckpointConfig, RunConfig
from pretrain.config.validate import validate
from pretrain.engine.step import evaluation_loss
from pretrain.engine.tables.stored_tables import Staged, StoredTable, StoredTables
from pretrain.errors import ConfigError
from pretrain.train.health.replicas import differing_replicas
from pretrain.train.loop import take_step
from tests.rotation import in_rotation

NUM_STEPS, EVALUATED = 4, (2, 3)
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one rank": (
        1,
        {"micro_batch_size": 4},
        (
            "engram",
            "engram, ple",
            "two families",
            "move",
            "tide",
            "stem",
            "move by n-grams",
            "ngram embedding",
            "residual n-grams",
            "mome",
        ),
    ),
    "one rank, two microbatches, recomputed": (
        1,
        {"micro_batch_size": 2, "recompute": "full"},
        ("engram, documents apart",),
    ),
    "pipeline 2 x virtual 2 x memory 2": (
        4,
        {"pipeline": 2, "virtual_pipeline": 2, "memory": 2, "micro_batch_size": 1},
        ("engram",),
    ),
    "tensor 2 x context 2 x memory 4": (
        4,
        {"tensor": 2, "context": 2, "memory": 4, "micro_batch_size": 4},
        (
            # Engram's rows beside another bank, a copy of heads' columns, rows read at once, and those that heads choose.
            "two families",
            "lave",
            "tide",
            "mome by n-grams, routed by values",
        ),
    ),
    # Replicas have files of their own.
    "data 2 x memory 2": (4, {"memory": 2, "micro_batch_size": 1}, ("engram, ple",)),
    "tensor 2 x pipeline 2": (
        4,
        {"tensor": 2, "pipeline": 2, "micro_batch_size": 2},
        ("move, unevenly", "residual n-grams"),
    ),
    # One stage has n-grams, which lie in files, and the other learned keys.
    "pipeline 2 x memory 2": (4, {"pipeline": 2, "memory": 2, "micro_batch_size": 2}, ("two families, by stage",)),
}


class Samples:
    """Samples of random tokens, by number; the third step's have no finite loss."""

    def __init__(self, config: RunConfig) -> None:
        self._length, self._separate = config.train.sequence_length, config.data.documents == "separate"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCAB_SIZE, (self._length + 1,), generator=generator)
        # One id in eight ends a document, or none does.
        ends = (ids[:-1] % 8 == 0).long() if self._separate else torch.zeros_like(ids[:-1])
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": torch.full((self._length,), math.nan if number in range(8, 12) else 1.0),
            "position_ids": document_positions(ends, eod=1),
        }


def on_samples(config: RunConfig, groups: ParallelGroups) -> TinyRun:
    """A run on samples that can be read by their numbers, as those of data sets."""
    run = build(config, groups)
    run.run.train_data = Samples(config)  # type: ignore[assignment]
    run.batches = run.run.batches()
    return run


def steps_on_layouts(
    run_ranks: Any, num_ranks: int, kinds: Mapping[str, str], config_of_kind: Callable[[str], RunConfig], num_steps: int
) -> dict[str, torch.Tensor]:
    """Loss and norm of every step of one rank, [steps, 2] by kind, once the layouts of so many ranks have taken the same.

    Args:
        kinds: kinds of models by layouts of `test_read_rows`, of any number of ranks.
    """
    cases = {
        name: (axes, kinds[name])
        for name, (size, axes) in (LAYOUTS_OF_ROWS | REPLICAS).items()
        if size == num_ranks and name in kinds
    }
    assert cases

    def steps(config: RunConfig) -> torch.Tensor:
        with joined(config) as groups:
            return torch.tensor(on_samples(config, groups).train(num_steps))

    def main() -> dict[str, torch.Tensor]:
        found = {}
        for name, (axes, kind) in cases.items():
            config = on(config_of_kind(kind), **axes)
            validate(config, num_ranks)
            found[name] = steps(config)
        return found

    expected: dict[str, torch.Tensor]
    (expected,) = run_ranks(lambda: {kind: steps(config_of_kind(kind)) for _, kind in cases.values()}, 1)
    for of_rank in run_ranks(main, num_ranks):
        for name, (_, kind) in cases.items():
            torch.testing.assert_close(
                of_rank[name],
                expected[kind],
                rtol=2e-5,
                atol=0,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    return expected


def config_for(kind: str, precision: Literal["fp32", "bf16"]) -> RunConfig:
    kind, _, documents = kind.partition(", documents ")
    if kind == "two families, by stage":
        return config_of(by_stage(MODELS["two families"]), "rows", precision)
    config = config_of(MODELS[kind], "rows", precision)
    return replace(config, data=replace(config.data, documents="separate")) if documents else config


def by_stage(model: ModelConfig) -> ModelConfig:
    """The model with its second family in the first two of four blocks, and the first one in the others."""
    assert model.memory is not None
    assert model.second_memory is not None
    first, second = (
        replace(memory, placement=PlacementConfig(blocks=blocks))
        for memory, blocks in ((model.memory, (2, 3)), (model.second_memory, (0, 1)))
    )
    return replace(model, memory=first, second_memory=second)


def in_files(config: RunConfig, folder: Path) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, table_folder=str(folder)))


def trained(run: TinyRun, num_steps: int, behind: Callable[[], object] = lambda: None) -> Trained:
    """A run's results of some more steps: what each says, with what is called behind it."""
    steps = [(*run.train(1), behind()) for _ in range(num_steps)]
    entries = run.optimizer.sharded_state_dict([chunk.sharded_state_dict() for chunk in run.bare])
    state = {key: entry.data.clone() for key, entry in entries.items() if ".row_" in key}
    # Losses that are not numbers are none the less alike.
    return Trained([str(step) for step in steps], {shard.key: shard.data.clone() for shard in shards(run.bare)}, state)


def with_evaluations(config: RunConfig, groups: ParallelGroups) -> Trained:
    """Results of all steps, of which the third has no update, and of losses without gradients behind one with an update and
    behind that, each with a step to follow."""
    run, numbers = on_samples(config, groups), itertools.count(1)
    from_the_start = {number: run.run.batches() for number in EVALUATED}

    def evaluated() -> float | None:
        if (number := next(numbers)) not in EVALUATED:
            return None
        sizes = (run.run.num_microbatches, config.train.micro_batch_size, config.train.sequence_length)
        names = ("num_microbatches", "micro_batch_size", "sequence_length")
        return evaluation_loss(run.chunks, from_the_start[number], groups, **dict(zip(names, sizes, strict=True))).mean

    found = trained(run, NUM_STEPS, evaluated)
    assert differing_replicas(run.run) == ()
    return found


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_tables_in_files_train_as_tables_on_the_device(run_ranks: Any, tmp_path: Path, num_ranks: int) -> None:
    cases: list[tuple[str, str, Any]] = [
        (layout, kind, "fp32" if number else "bf16")
        for layout, (size, _, kinds) in LAYOUTS.items()
        for number, kind in enumerate(kinds)
        if size == num_ranks
    ]

    def main() -> dict[str, Any]:
        found = {}
        for layout, kind, precision in in_rotation(cases):
            config = on(config_for(kind, precision), **LAYOUTS[layout][1])
            stored = in_files(config, tmp_path)
            validate(stored, num_ranks)
            with joined(config) as groups:
                device, files = with_evaluations(config, groups), with_evaluations(stored, groups)
            found[f"{layout}, {kind}"] = differences(device, files), len(set(device.steps))
        return found

    for by_case in run_ranks(main, num_ranks):
        assert by_case
        assert all(case == ([], NUM_STEPS) for case in by_case.values()), by_case
    # Files have no names.
    assert not list(tmp_path.iterdir())


def test_a_rank_reads_its_share_of_the_samples_and_knows_all_ids(run_ranks: Any) -> None:
    """Six samples on four ranks: two each, of which the last rank's are the last sample, twice."""
    config = on(config_for("engram", "fp32"), tensor=2, context=2, memory=4, micro_batch_size=2)

    def main() -> tuple[list[int], list[list[int]]]:
        with joined(config) as groups:
            run, numbers = on_samples(config, groups), list[int]()
            reads, whole = run.run.reads, Samples.__getitem__

            def counted(self: Samples, number: int) -> dict[str, torch.Tensor]:
                numbers.append(number)
                return whole(self, number)

            with patch.object(Samples, "__getitem__", counted):
                own = reads.own_ids(range(10, 16))
            return numbers, reads.exchanged(own)[0].tolist()

    found = run_ranks(main, 4)
    assert [numbers for numbers, _ in found] == [[10, 11], [12, 13], [14, 15], [15, 15]]
    samples = Samples(config)
    expected = [samples[number]["tokens"].tolist() for number in (*range(10, 16), 15, 15)]
    assert all(ids == expected for _, ids in found)


def test_a_rank_killed_while_it_writes_back_loses_nothing_that_a_checkpoint_has(run_ranks: Any, tmp_path: Path) -> None:
    """Half of the rows of step 4 are written when the rank dies; from step 2 the run goes on in files, and on a device."""
    device = config_for("engram", "bf16")
    stored = in_files(device, tmp_path / "tables")

    def killed() -> None:
        with joined(stored) as groups:
            run = on_samples(stored, groups)
            run.train(2)
            run.save(tmp_path)
            run.train(1)
            write = StoredTables._write

            def half(self: StoredTables, table: StoredTable, staged: Staged, updated: Any, copied: None) -> None:
                num = len(staged.rows) // 2
                write(self, table, replace(staged, rows=staged.rows[:num]), [rows[:num] for rows in updated], copied)
                os.kill(os.getpid(), signal.SIGKILL)

            with patch.object(StoredTables, "_write", half):
                run.train(2)

    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run_ranks(killed, 1)
    assert not list((tmp_path / "tables").iterdir())

    def resumed() -> list[list[str]]:
        with joined(device) as groups:
            straight = on_samples(device, groups)
            straight.train(2)
            expected, found = trained(straight, 2), []
            for config in (device, stored):
                run = on_samples(config, groups)
                run.resume(tmp_path / "step_00000002")
                found.append(differences(expected, trained(run, 2)))
            # Once more, as after a spike: what was fetched meanwhile is of no use.
            run.resume(tmp_path / "step_00000002")
            run.batches = run.run.batches()
            return [*found, differences(expected, trained(run, 2))]

    assert run_ranks(resumed, 1) == [[[], [], []]]


def test_a_save_waits_for_rows_that_are_being_written_back(run_ranks: Any, tmp_path: Path) -> None:
    """Rows of the last step are written no sooner than somebody waits for them, however fast the disk is."""
    device = config_for("engram", "bf16")
    stored = in_files(device, tmp_path / "tables")

    def main() -> None:
        with joined(stored) as groups:
            straight, run = on_samples(device, groups), on_samples(stored, groups)
            straight.train(2)
            straight.save(tmp_path / "device")
            run.train(1)
            waited_for, write, settle = threading.Event(), StoredTables._write, StoredTables.settle

            def late(*arguments: Any) -> None:
                waited_for.wait()
                write(*arguments)

            def awaited(tables: StoredTables) -> None:
                waited_for.set()
                settle(tables)

            with patch.object(StoredTables, "_write", late), patch.object(StoredTables, "settle", awaited):
                try:
                    take_step(run.run, run.batches)
                    run.save(tmp_path / "files")
                finally:
                    waited_for.set()

    run_ranks(main, 1)
    expected, found = (read_all(tmp_path / place / "step_00000002") for place in ("device", "files"))
    assert found.keys() == expected.keys()
    assert not [key for key in expected if not torch.equal(found[key], expected[key])]


def test_a_table_larger_than_memory_trains_as_one_that_fits(run_ranks: Any, tmp_path: Path) -> None:
    """Under a limit of what a process may hold of its own, which leaves no room for the table on the device."""
    model = MODELS["engram"]
    assert isinstance(model.memory, EngramConfig)
    memory = replace(model.memory, rows_per_head=1 << 18, value_dim=32)
    device = config_of(replace(model, memory=memory), "rows", "bf16")
    stored = in_files(device, tmp_path)
    most_of_tables = sum(48 * bank.num_rows for bank in device.model.memory_plan.banks)

    def digest(run: TinyRun) -> list[str]:
        steps = [str(run.train(2))]
        for bank in run.bare[0].own_banks:
            hashed = hashlib.sha256()
            for rows in bank.get_parameter("values").detach().split(1 << 16):
                hashed.update(rows.contiguous().view(torch.uint8).numpy().data)
            steps.append(hashed.hexdigest())
        return steps

    def main() -> list[list[str]]:
        with joined(device) as groups:
            expected = digest(on_samples(device, groups))
            gc.collect()
            unlimited = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (held("VmData") + most_of_tables, unlimited[1]))
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                on_samples(device, groups)
            # The limit counts the stacks of threads, whether they are used or not.
            with patch("pretrain.engine.tables.table_files._READERS", 2):
                run = on_samples(stored, groups)
                found = digest(run)
            # A thread copies an item at a time, as from a GPU.
            with patch("pretrain.checkpoint.saver.plan_writes", partial(plan_writes, item_bytes=1 << 22)):
                run.save(tmp_path)
            resource.setrlimit(resource.RLIMIT_DATA, unlimited)
        return [expected, found]

    ((expected, found),) = run_ranks(main, 1)
    assert found == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model": MODELS["shared"]},
            (
                "model.memory.kind is ultramem_v2",
                "as those of move, lave, value_ngrams, mome, tide, stem, engram, residual_ngrams, ngram_embedding are",
            ),
        ),
        ({"checkpoint": CheckpointConfig(asynchronous=True)}, ("checkpoint.asynchronous: false",)),
    ],
    ids=["retrieval", "asynchronous"],
)
def test_what_cannot_lie_in_files_is_refused(change: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    config = replace(config_for("engram", "fp32"), **change)
    validate(config, 1)
    with pytest.raises(ConfigError) as refused:
        validate(in_files(config, tmp_path), 1)
    assert all(word in str(refused.value) for word in (f"optimizer.table_folder is '{tmp_path}'", *words))


def test_a_disk_without_room_is_named_before_the_first_step(run_ranks: Any, tmp_path: Path) -> None:
    """As a limit of a file's size says it, for a table of 4 TB."""
    (tmp_path / "file").touch()

    def main() -> list[str]:
        found = []
        with joined(config_for("engram", "fp32")):
            for folder, num_rows in ((tmp_path / "new", 1 << 38), (tmp_path / "file", 1)):
                with pytest.raises(ConfigError) as refused:
                    StoredTables(folder, torch.device("cpu")).room((num_rows, 4), torch.bfloat16)
                found.append(str(refused.value))
        return found

    ((without_room, no_folder),) = run_ranks(main, 1)
    assert f"table_folder is '{tmp_path / 'new'}', and a table of 4.4e+03 GB cannot be made there" in without_room
    assert "File exists" in no_folder or "Not a directory" in no_folder


def held(what: str) -> int:
    """Bytes that this process holds, by a line of Linux's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))
