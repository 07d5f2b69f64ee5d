"""A comparison: models alike in tokens, their runs, and the report of what is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from lab.pages import Page
from lab.studies.compare.addresses import Addresses, addresses_of
from lab.studies.compare.controls import (
    Controlled,
    controls_of,
    controls_section,
    distinct,
    trained_once,
    with_memory,
)
from lab.studies.compare.leads import leads, leads_picture
from lab.studies.compare.report import Tuned, plot, report, table
from lab.studies.compare.rules import (
    ModelFigures,
    model_figures,
    with_seed,
)
from lab.studies.compare.runs import RunResult, Trainer, finished_steps
from lab.studies.compare.side_by_side import Job, run_side_by_side
from lab.studies.compare.sweep import sweep_picture, swept_key
from lab.studies.compare.target import check_target, target_section
from lab.studies.compare.tuning import Search, Tuning, check_keys, read_tuning
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from tools.common.drawing import svg
from tools.common.ranks import import_engine
from tools.common.vocabulary import with_vocabulary_of


class Comparison:
    """Models, and what is known of them so far."""

    def __init__(
        self,
        models: list[RunConfig],
        seeds: Sequence[int],
        num_ranks: int,
        run_dir: Path,
        page: Page,
        command: str,
        *,
        controls: Sequence[str] = (),
        target_loss: float | None = None,
        at_once: int = 1,
    ) -> None:
        """Check that every run can be made.

        Args:
            seeds: seeds of the weights.
            run_dir: folder of the runs.
            page: page for the report.
            command: command that makes the report again.
            controls: controls that models with a memory will have.
            target_loss: loss in nats per token, which models are to reach; None: there is none.
            at_once: runs that train side by side.

        Raises:
            ConfigError: a model or a control cannot be trained with one of the seeds.
            DataError: the data is not there.
        """
        self.controls, self.target_loss = controls, target_loss
        if target_loss is not None:
            check_target(models, seeds)
        for config in (*models, *self._controls_of(models)):
            for seed in seeds:
                validate(with_seed(config, seed), num_ranks)
        import_engine()
        self.models, self.seeds, self.num_ranks, self.at_once = models, seeds, num_ranks, at_once
        self.run_dir, self.page, self.command = run_dir, page, command
        self.figures = _figures(models)
        self.results: dict[str, list[RunResult]] = {}
        self.controlled: list[Controlled] = []
        self.control_results: dict[str, list[RunResult]] = {}
        self.addresses: dict[str, list[Addresses]] = {}
        self.tuned: Tuned | None = None
        self.trainer = self._trainer(num_trials=0, num_trial_steps=0)

    def _controls_of(self, models: Sequence[RunConfig]) -> list[RunConfig]:
        """The controls of models as they are now: with other settings, others."""
        if not self.controls:
            return []
        return distinct(self._controlled(models))

    def _controlled(self, models: Sequence[RunConfig]) -> list[Controlled]:
        from pretrain.data.blend import check_blend, model_vocab_size

        tokenizer = check_blend(models[0].data.datasets)
        return trained_once(
            [
                controls_of(config, model_vocab_size(config.model, tokenizer), self.controls)
                for config in with_memory(models)
            ]
        )

    def _trainer(self, *, num_trials: int, num_trial_steps: int) -> Trainer:
        num_models = len(self.models) + len(self._controls_of(self.models))
        runs, trials = num_models * len(self.seeds), len(self.models) * num_trials
        return Trainer(
            self.num_ranks,
            num_runs=trials + runs,
            num_steps=trials * num_trial_steps + runs * self.models[0].train.num_steps,
        )

    def tune(self, paths: Sequence[str], overrides: list[str], tuning_file: Path) -> None:
        """Give every model the best settings of its search.

        Args:
            paths: paths of the models' files.
            overrides: overrides of all of them.

        Raises:
            RunStopped: a trial did not come to its end.
        """
        tuning = read_tuning(tuning_file)
        if tuning.seed in self.seeds:
            raise ConfigError(
                f"{tuning_file} tunes with seed {tuning.seed}, which is one of --seeds: what was chosen on a seed says "
                "nothing on it, so choose others"
            )
        searches = [Search(path, overrides, tuning) for path in paths]
        for unread in check_keys(tuning, tuning_file, searches):
            print(f"{tuning_file}: no model here reads {unread}: other keys have its trials", flush=True)
        for config in self.models:
            validate(searches[0].shortened(config), self.num_ranks)
        self.trainer = self._trainer(num_trials=tuning.num_trials, num_trial_steps=tuning.num_steps)
        self.tuned = Tuned(tuning, {})
        self._side_by_side(
            [
                Job(
                    f"search of {model.name}",
                    self.run_dir / model.name / "search.log",
                    partial(self._search, model.name, search, tuning),
                    tuning.num_trials * tuning.num_steps,
                )
                for model, search in zip(self.models, searches, strict=True)
            ]
        )
        for index, (model, search) in enumerate(zip(self.models, searches, strict=True)):
            self._search(model.name, search, tuning)
            self.tuned = Tuned(tuning, {**self.tuned.trials, model.name: search.trials})
            self.models[index] = search.best.config
            self.write()

    def _search(self, name: str, search: Search, tuning: Tuning) -> None:
        def train(config: RunConfig, number: int) -> float:
            folder = self.run_dir / config.name / f"trial_{number}"
            return self.trainer.train(config, folder, f"{name}, trial {number}").validation_loss

        search.run(train)
        self.trainer.skip(tuning.num_trials - len(search.trials), tuning.num_steps)

    def _side_by_side(self, jobs: Iterable[Job]) -> None:
        """Do jobs at once whose results are then found, one by one, where they left them. Without `--at-once`, nothing.

        Raises:
            RunStopped: a job did not come to its end.
        """
        if self.at_once > 1:
            run_side_by_side(list(jobs), self.at_once, self.num_ranks)

    def _jobs(self, plan: Sequence[tuple[RunConfig, str]]) -> list[Job]:
        """Trainings that are not finished, of configurations with their seeds and names."""
        jobs = []
        for config, what in plan:
            folder = RunFolder(self._folder(config))
            steps_left = config.train.num_steps - finished_steps(config, folder)
            if steps_left > 0:
                trainer = Trainer(self.num_ranks, num_runs=1, num_steps=steps_left)
                work = partial(trainer.train, config, folder.path, what)
                jobs.append(Job(what, folder.logs / "screen.log", work, steps_left))
        return jobs

    def _folder(self, config: RunConfig) -> Path:
        """Folder of the run of a configuration and its seed."""
        return self.run_dir / config.name / f"seed_{config.seed}"

    def train(self) -> None:
        """Train the runs that are reported, and report them.

        Raises:
            CheckpointError: a folder holds a run of something else.
            RunStopped: a run did not come to its end.
        """
        plan = [
            (with_seed(config, seed), f"{config.name}, seed {seed}") for seed in self.seeds for config in self.models
        ]
        # Every folder is looked at before the first run starts, so that one of another comparison is found at once.
        self._side_by_side(self._jobs(plan))
        for config, what in plan:
            result = self.trainer.train(config, self._folder(config), what)
            self.results.setdefault(config.name, []).append(result)
            self.write()
        if self.target_loss is not None:
            print(target_section(self.target_loss, self.models, self.results), flush=True)
        print(f"\n{table(self.figures, self.results)}\n\nreport: {self.page.path}\nplot: {self.page.plot}", flush=True)

    def train_controls(self) -> None:
        """Train the controls of every model with a memory, with the models' own settings, and judge it.

        Raises:
            CheckpointError: a folder holds a run of something else.
            RunStopped: a run did not come to its end.
        """
        self.controlled = self._controlled(self.models)
        self._side_by_side(self._control_jobs())
        for seed in self.seeds:
            for each in self.controlled:
                model = with_seed(each.model, seed)
                found = addresses_of(model, self._folder(model), self.num_ranks)
                self.addresses.setdefault(each.model.name, []).append(found)
            for config, what in self._control_plan(seed):
                result = self.trainer.train(config, self._folder(config), what)
                self.control_results.setdefault(config.name, []).append(result)
                self.write()
        print(controls_section(self.controlled, self.results, self.control_results, self.addresses), flush=True)

    def _control_plan(self, seed: int) -> list[tuple[RunConfig, str]]:
        return [
            (with_seed(control, seed), f"{', '.join(control.name.rsplit('.', 1))}, seed {seed}")
            for control in distinct(self.controlled)
        ]

    def _control_jobs(self) -> Iterator[Job]:
        """Controls, seed by seed, and what the trained models lose without their addresses."""
        for seed in self.seeds:
            for each in self.controlled:
                model = with_seed(each.model, seed)
                work = partial(addresses_of, model, self._folder(model), self.num_ranks)
                screen = RunFolder(self._folder(model)).logs / "addresses.log"
                yield Job(f"{model.name}, addresses, seed {seed}", screen, work)
            yield from self._jobs(self._control_plan(seed))

    def write(self) -> None:
        """Write the report of what is there."""
        text = report(
            self.models,
            self.figures,
            self.results,
            seeds=self.seeds,
            plot_name=self.page.plot.name,
            command=self.command,
            tuned=self.tuned,
        )
        others = {}
        if self.tuned is not None and (key := swept_key(self.tuned.tuning)) is not None:
            others["search"] = svg(sweep_picture(key, self.tuned.trials))
            text += f"\n![Losses of the search]({self.page.plot_called('search').name})\n"
        if self.target_loss is not None:
            text += target_section(self.target_loss, self.models, self.results)
        if self.controlled:
            text += controls_section(self.controlled, self.results, self.control_results, self.addresses)
            others["controls"] = svg(leads_picture(leads(self.controlled, self.results, self.control_results)))
            text += f"\n![Leads over controls]({self.page.plot_called('controls').name})\n"
        self.page.write(text, svg(plot(self.figures, self.results)), **others)


def _figures(models: Sequence[RunConfig]) -> list[ModelFigures]:
    """Figures of models whose data is there, as its tokenizer may say how many ids they have."""
    from pretrain.data.blend import check_blend

    tokenizer = check_blend(models[0].data.datasets)
    return [model_figures(with_vocabulary_of(config, tokenizer)) for config in models]
