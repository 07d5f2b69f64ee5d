"""A trained model that is taught facts in one way: batch after batch, asked after each."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.studies.compare.runs import RunStopped
from lab.studies.teach.course import Course, Taught, ask_all
from lab.studies.teach.facts import Fact, draw_facts, in_batches, prepare_facts
from lab.studies.teach.ways import WAYS, RowBudget, TeachingWay
from pretrain.checkpoint.folder import step_folder
from pretrain.config.loader import to_dict
from pretrain.config.schema import (
    CheckpointConfig,
    DataConfig,
    DatasetEntry,
    EvaluationConfig,
    EvaluationEntry,
    LoggingConfig,
    ParallelConfig,
    RunConfig,
)
from pretrain.config.source import dump_yaml
from pretrain.config.stages import read_run
from pretrain.config.validate import validate
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config, starting_checkpoint, starting_point

if TYPE_CHECKING:
    from pretrain.checkpoint.folder import SavedState
    from pretrain.data.tokenizer import Tokenizer

_RESULT = "taught.json"


@dataclass(frozen=True)
class Lesson:
    """A model that is taught facts in one way, at one rate.

    Attributes:
        model: the trained run's folder.
        folder: folder of the lesson.
        background: file of the reads of the model's own text.
    """

    model: Path
    way: str
    rate: float
    seed: int
    course: Course
    folder: Path
    background: Path

    @classmethod
    def of(cls, model: Path, way: str, rate: float, seed: int, course: Course, run_dir: Path) -> Lesson:
        """A lesson of a study in `run_dir`."""
        own = run_dir / model.name
        return cls(model, way, rate, seed, course, own / f"seed_{seed}" / f"{way}_{rate:g}", own / "known.npz")

    @property
    def what(self) -> str:
        """The lesson in words."""
        return f"{self.model.name}, {self.way} at {self.rate:g}, seed {self.seed}"

    def prepare(self) -> None:
        """Write data and exports that lessons of one seed, or of one model, have in common."""
        if WAYS[self.way].optimizer is None:
            self._export()
        for path, facts in zip(self._paths, self._batches, strict=True):
            prepare_facts(facts, path, self._tokenizer)

    def taught(self) -> Taught:
        """Teach and ask, unless that is done. The lesson has been prepared.

        Raises:
            RunStopped: the training did not come to its end.
        """
        if (result := self.result) is not None:
            return result
        way = WAYS[self.way]
        self.folder.mkdir(parents=True, exist_ok=True)
        if way.optimizer is None:
            from lab.studies.teach.lora import teach_adapter

            found = teach_adapter(
                self.exported, self._batches, self._tokenizer, self.config, self.course, rate=self.rate, seed=self.seed
            )
        else:
            found = self._train(way, self._batches)
        (self.folder / _RESULT).write_text(
            json.dumps({"course": asdict(self.course), **asdict(found)}), encoding="utf-8"
        )
        return found

    @property
    def result(self) -> Taught | None:
        """Result; None: there is none of this course yet."""
        path = self.folder / _RESULT
        if not path.exists():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return Taught(**content) if content.pop("course") == asdict(self.course) else None

    @cached_property
    def saved(self) -> SavedState:
        """The model's newest checkpoint."""
        return find_checkpoint(RunFolder(self.model), None)

    @cached_property
    def config(self) -> RunConfig:
        """The model's own configuration, on one rank."""
        return saved_config(self.saved, ParallelConfig())

    def _export(self) -> None:
        """Export the model for transformers, unless that is done."""
        from tools.cli import main

        if not self.exported.exists():
            code = main(["checkpoint", "convert", str(self.model), str(self.exported), "--format", "huggingface"])
            assert code == 0, f"{self.model} could not be exported"

    @property
    def exported(self) -> Path:
        """Folder of the model for transformers."""
        return self.background.with_name("exported")

    @property
    def _batches(self) -> list[Sequence[Fact]]:
        return in_batches(draw_facts(self.course.num_facts, self.seed), self.course.num_batches)

    @property
    def _paths(self) -> list[Path]:
        """Data sets of the batches."""
        folder, number = self.folder.parent / "data", self.course.num_batches
        return [
            folder / f"{self.course.num_facts}_facts_{place}_of_{number}" for place in range(1, len(self._batches) + 1)
        ]

    @property
    def _tokenizer(self) -> Tokenizer:
        from pretrain.data.manifest import open_saved_tokenizer

        return open_saved_tokenizer(RunFolder(self.model).tokenizer)

    def _train(self, way: TeachingWay, batches: Sequence[Sequence[Fact]]) -> Taught:
        """Train the run's own way, a stage for every batch."""
        from parallel.processes.launch import launch_ranks
        from tools.common.ranks import run_on_ranks
        from tools.train import train_rank

        file = self.folder / "lesson.yaml"
        file.write_text(dump_yaml(self._stages(way)), encoding="utf-8")
        folder = RunFolder(self.folder / "run")
        start = starting_checkpoint(self.model, folder)
        stages = [validate(stage, 1) for stage in read_run(file, []).stages(starting_point(start))]
        folder.make()
        began = time.monotonic()
        code = run_on_ranks(partial(train_rank, stages, folder, start, quiet=True), 1, log_dir=folder.logs)
        seconds = time.monotonic() - began
        if code:
            raise RunStopped(code)
        recall, known = [], []
        for number, stage in enumerate(stages, start=1):
            saved = step_folder(folder.checkpoints, stage.train.num_steps)
            ask = partial(_ask_rank, self.config, saved, batches[:number], self.course.num_windows)
            of_batches, nats = launch_ranks(ask, 1)[0]
            recall.append(of_batches)
            known.append(nats)
        patch_bytes = self._patch_bytes(saved) if way.moves_rows_alone else None
        return Taught(recall, known, seconds, patch_bytes)

    def _stages(self, way: TeachingWay) -> dict[str, Any]:
        """The run in plain values."""
        assert way.optimizer is not None
        own, course, paths = self.config, self.course, self._paths
        budget = RowBudget(course.num_rows, self.background.absolute())
        config = replace(
            own,
            name="taught",
            optimizer=way.optimizer(own.optimizer, self.rate, budget),
            train=replace(
                own.train,
                num_steps=course.num_steps,
                global_batch_size=course.batch_size,
                micro_batch_size=math.gcd(own.train.micro_batch_size, course.batch_size),
                batch_ramp=None,
            ),
            data=DataConfig((DatasetEntry(str(paths[0].absolute())),), seed=self.seed, documents="separate"),
            evaluation=EvaluationConfig((EvaluationEntry(str(paths[0].absolute())),), max_sequences=1),
            checkpoint=CheckpointConfig(keep_last=0),
            logging=LoggingConfig(memory_every_steps=0),
            stage=None,
        )
        plain = to_dict(config)
        del plain["train"]["num_steps"]
        plain["stages"] = [
            {
                "name": f"batch_{number}",
                "num_steps": course.num_steps,
                "optimizer_state": "reset",
                "data": {"datasets": [{"path": str(path.absolute())}]},
            }
            for number, path in enumerate(paths, start=1)
        ]
        return plain

    def _patch_bytes(self, taught: Path) -> int:
        """Bytes of the patch that makes the taught model of the model, which is kept beside it."""
        from tools.cli import main

        patch = self.folder / "taught.safetensors"
        if not patch.exists():
            code = main(["patch", "make", str(self.saved.path), str(taught), "--output", str(patch)])
            assert code == 0, f"{taught} differs from {self.saved.path} in more than rows"
        return patch.stat().st_size


def _ask_rank(
    config: RunConfig, checkpoint: Path, batches: Sequence[Sequence[Fact]], num_windows: int
) -> tuple[list[float], float]:
    """Ask a checkpoint of a model, on one rank."""
    from pretrain.data.blend import check_blend
    from pretrain.engine.session import session
    from pretrain.evaluation.restore import restore_model

    with session(config) as groups:
        tokenizer = check_blend(config.evaluated)
        (model,) = restore_model(config, checkpoint, tokenizer, groups)
        return ask_all(
            lambda tokens, positions: model(tokens, positions, None)[..., : tokenizer.vocab_size],
            config,
            batches,
            tokenizer,
            num_windows,
        )


def known_before(model: Path, num_windows: int) -> float:
    """Loss of a model on held-out windows before it is taught anything."""
    from parallel.processes.launch import launch_ranks

    saved = find_checkpoint(RunFolder(model), None)
    config = saved_config(saved, ParallelConfig())
    _, nats = launch_ranks(partial(_ask_rank, config, saved.path, [], num_windows), 1)[0]
    return nats
