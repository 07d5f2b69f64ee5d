"""A model that is told facts, and then asked: documents, training, answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.facts import documents, make_facts, write_documents
from lab.studies.compare.runs import Trainer, finished_steps
from lab.studies.compare.side_by_side import Job
from pretrain.config.schema import DataConfig, DatasetEntry, ParallelConfig, RunConfig
from pretrain.run.folder import RunFolder

if TYPE_CHECKING:
    from lab.studies.recall.asking import Recall
    from pretrain.checkpoint.folder import SavedState

MOST_ASKED = 8192
"""Facts that a model is asked for, of those that it was told."""
# Share of the documents, besides those that training reads: some are held out.
_VALIDATION_FRACTION = 0.01
_ANSWERS = "recall.json"


@dataclass(frozen=True)
class Told:
    """A model that is told so many facts.

    Attributes:
        config: configuration with the facts as its data; its seed is that of weights, facts and their order.
        number: number of the facts.
        folder: folder of its run.
        num_ranks: ranks that train and ask.
    """

    config: RunConfig
    number: int
    folder: Path
    num_ranks: int

    @classmethod
    def of(cls, config: RunConfig, number: int, seed: int, run_dir: Path, num_ranks: int) -> Told:
        """A model of a study in `run_dir`."""
        folder = Path(f"facts_{number}") / f"seed_{seed}"
        told = replace(
            config,
            seed=seed,
            data=DataConfig((DatasetEntry(str((run_dir / "data" / folder).absolute())),)),
            evaluation=replace(config.evaluation, every_steps=0),
        )
        return cls(told, number, run_dir / config.name / folder, num_ranks)

    @property
    def what(self) -> str:
        """The run in words."""
        return f"{self.config.name}, {self.number:,} facts, seed {self.config.seed}"

    @property
    def is_asked(self) -> bool:
        """True if its answers are there, and of its last step."""
        finished = finished_steps(self.config, RunFolder(self.folder)) >= self.config.train.num_steps
        return finished and (self.folder / _ANSWERS).exists()

    def write_documents(self) -> None:
        """Documents for one pass over the run, unless they are there."""
        from pretrain.data.manifest import MANIFEST_FILE
        from pretrain.data.prepare import prepare
        from pretrain.data.tokenizer import ByteTokenizer

        train, seed = self.config.train, self.config.seed
        (dataset,) = self.config.data.datasets
        folder = Path(dataset.path)
        if (folder / MANIFEST_FILE).exists():
            return
        letters = int(train.num_steps * train.tokens_per_step * (1 + 2 * _VALIDATION_FRACTION))
        source = folder.with_name(f"{folder.name}.jsonl")
        source.parent.mkdir(parents=True, exist_ok=True)
        write_documents(source, documents(make_facts(self.number, seed), letters, train.sequence_length, seed))
        prepare([str(source)], folder, ByteTokenizer(), validation_fraction=_VALIDATION_FRACTION)
        source.unlink()

    def job(self) -> Job:
        """Training and asking, for `run_side_by_side`."""
        folder, num_steps = RunFolder(self.folder), self.config.train.num_steps
        work = partial(self.recalled, Trainer(self.num_ranks, num_runs=1, num_steps=num_steps))
        return Job(self.what, folder.logs / "screen.log", work, num_steps - finished_steps(self.config, folder))

    def recalled(self, trainer: Trainer) -> Recall:
        """Train it to its end and ask it, unless that is done.

        Raises:
            CheckpointError: the folder holds a run of something else.
            RunStopped: the run did not come to its end.
        """
        trainer.train(self.config, self.folder, self.what)
        return self._answers()

    def _answers(self) -> Recall:
        """Recall of the finished run, kept beside its checkpoint."""
        from lab.studies.recall.asking import Recall
        from parallel.processes.launch import launch_ranks
        from pretrain.run.saved_run import find_checkpoint

        saved = find_checkpoint(RunFolder(self.folder), None)
        kept = self.folder / _ANSWERS
        if kept.exists():
            content = json.loads(kept.read_text(encoding="utf-8"))
            if content.pop("step") == saved.step:
                return Recall(**content)
        facts = make_facts(self.number, self.config.seed)[:MOST_ASKED]
        found: Recall = launch_ranks(lambda: _ask_rank(saved, facts), self.num_ranks)[0]
        kept.write_text(json.dumps({"step": saved.step, **asdict(found)}), encoding="utf-8")
        return found


def _ask_rank(saved: SavedState, facts: Sequence[str]) -> Recall:
    """Ask on one rank."""
    from lab.studies.recall.asking import recall
    from pretrain.data.tokenizer import ByteTokenizer
    from pretrain.engine.session import session
    from pretrain.evaluation.restore import restore_model
    from pretrain.run.saved_run import saved_config

    config = saved_config(saved, ParallelConfig())
    with session(config) as groups:
        tokenizer = ByteTokenizer()
        (model,) = restore_model(config, saved.path, tokenizer, groups)
        train = config.train
        return recall(
            model,
            facts,
            tokenizer,
            groups,
            micro_batch_size=train.micro_batch_size,
            sequence_length=train.sequence_length,
        )
