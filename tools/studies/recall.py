"""`megamem recall`: how many facts do models of equal compute know by heart?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pretrain.config.schema import DataConfig, DatasetEntry, ParallelConfig, RunConfig
from pretrain.config.validate import validate
from pretrain.data.facts import GUESS_NATS, MAX_FACTS, documents, make_facts, write_documents
from pretrain.run.folder import RunFolder
from tools.drawing import model_colours, svg
from tools.parameter_table import markdown_table
from tools.ranks import add_nproc, import_engine
from tools.studies.compare.arguments import (
    add_at_once,
    add_controls,
    add_folders,
    add_models,
    command_line,
    controls_option,
    open_page,
    refuse_launcher,
)
from tools.studies.compare.controls import controls_of, with_memory
from tools.studies.compare.rules import ModelFigures, inequalities, load_configs, model_figures
from tools.studies.compare.runs import RunStopped, Trainer, finished_steps
from tools.studies.compare.side_by_side import Job, run_side_by_side
from tools.vocabulary import with_vocabulary_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pretrain.checkpoint.folder import SavedState
    from pretrain.evaluation.recall import Recall

Recalls: TypeAlias = dict[str, dict[int, "Recall"]]
"""Recalls by model and number of facts."""

MOST_ASKED = 8192
"""Facts that a model is asked for, of those that it was told."""
# Share of the documents, besides those that training reads: some are held out.
_VALIDATION_FRACTION = 0.01
_ANSWERS = "recall.json"
_EPILOG = """\
examples:
  megamem study recall configs/compare/dense.yaml configs/compare/ultramemv2.yaml --facts 1024,4096,16384 --nproc 2

Every model is trained on documents that state so many facts (names with random values) again and again, for as many
tokens and steps as its configuration says; bytes are its tokens. Then it is asked for the values. The run of a model
and a number of facts is in DIR/NAME/facts_N, the documents in DIR/data/facts_N. Finished runs are kept and interrupted
ones resumed.

With --controls, every model with a memory is also told the facts without what makes it one, as `megamem study compare
--controls` says: it takes seven times as long. With --at-once N, N runs train side by side.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `recall` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "recall",
        help="how many facts models know by heart, at equal compute",
        description="Train models on rising numbers of random facts, ask them, and write a table and a plot.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_models(parser)
    parser.add_argument(
        "--facts",
        type=numbers_of_facts,
        default=(1024, 4096, 16384),
        metavar="N,N",
        help="numbers of facts (default: 1024,4096,16384)",
    )
    add_controls(parser, "tell every model with a memory again without what makes it one")
    add_at_once(parser)
    add_folders(parser, "recall", "recall")
    add_nproc(parser, "1", default=1)
    parser.set_defaults(func=run_recall)


def numbers_of_facts(text: str) -> tuple[int, ...]:
    """The value of `--facts`."""
    numbers = tuple(sorted({int(part) for part in text.split(",")}))
    if not 1 <= numbers[0] <= numbers[-1] <= MAX_FACTS:
        raise argparse.ArgumentTypeError(f"{text}: give numbers from 1 to {MAX_FACTS}, the names that there are")
    return numbers


def run_recall(args: argparse.Namespace) -> int:
    """Trains and asks what is not there yet, and writes the report."""
    refuse_launcher("recall")
    models = list(load_configs(args.configs, args.overrides).values())
    if args.controls:
        models += _controls(models, args.controls)
    for config in models:
        validate(config, args.nproc)
    page = open_page(args, "recall")
    options = ["--facts", ",".join(map(str, args.facts)), *controls_option(args.controls)]
    command = command_line(args, "recall", *options)
    import_engine()
    figures = _figures(models)
    trainer = Trainer(
        args.nproc,
        num_runs=len(models) * len(args.facts),
        num_steps=len(models) * len(args.facts) * models[0].train.num_steps,
    )
    found: Recalls = {config.name: {} for config in models}
    for number in args.facts:
        _prepare(_documents(args.run_dir, number), number, models[0])
    plan = [
        _Told(_told(config, args.run_dir, number), number, args.run_dir / config.name / f"facts_{number}", args.nproc)
        for number in args.facts
        for config in models
    ]
    try:
        if args.at_once > 1:
            jobs = [
                Job(run.what, RunFolder(run.folder).logs / "screen.log", partial(run.recalled, run.own_trainer()))
                for run in plan
                if not run.is_asked
            ]
            run_side_by_side(jobs, args.at_once, args.nproc)
        for run in plan:
            found[run.config.name][run.number] = run.recalled(trainer)
            text = report(models[0], figures, found, plot_name=page.plot.name, command=command)
            page.write(text, svg(plot(found)))
    except RunStopped as stopped:
        return stopped.exit_code
    print(f"\n{table(figures, found)}\n\nreport: {page.path}\nplot: {page.plot}", flush=True)
    return 0


def _controls(models: Sequence[RunConfig], names: Sequence[str]) -> list[RunConfig]:
    """These controls of the models with a memory, as models; says which there cannot be.

    Raises:
        ConfigError: no model has a memory.
    """
    from pretrain.data.tokenizer import ByteTokenizer

    controlled = [controls_of(config, ByteTokenizer.vocab_size, names) for config in with_memory(models)]
    for each in controlled:
        for name, why in each.left_out.items():
            print(f"note: {each.model.name} has no {name}: {why}", flush=True)
    return [control for each in controlled for control in each.controls.values()]


def _documents(run_dir: Path, number: int) -> Path:
    return run_dir / "data" / f"facts_{number}"


def _told(config: RunConfig, run_dir: Path, number: int) -> RunConfig:
    """A model as it is told so many facts."""
    return replace(
        config,
        data=DataConfig((DatasetEntry(str(_documents(run_dir, number))),)),
        evaluation=replace(config.evaluation, every_steps=0),
    )


@dataclass(frozen=True)
class _Told:
    """A model that is told facts, and then asked.

    Attributes:
        config: with the facts as its data.
        number: of the facts.
        folder: of its run.
        num_ranks: that train and ask.
    """

    config: RunConfig
    number: int
    folder: Path
    num_ranks: int

    @property
    def what(self) -> str:
        """The run in words."""
        return f"{self.config.name}, {self.number:,} facts"

    @property
    def is_asked(self) -> bool:
        """True if its answers are there, and of its last step."""
        finished = finished_steps(self.config, RunFolder(self.folder)) >= self.config.train.num_steps
        return finished and (self.folder / _ANSWERS).exists()

    def own_trainer(self) -> Trainer:
        """A trainer of this run alone."""
        return Trainer(self.num_ranks, num_runs=1, num_steps=self.config.train.num_steps)

    def recalled(self, trainer: Trainer) -> Recall:
        """Train it to its end and ask it, unless that is done.

        Raises:
            CheckpointError: the folder holds a run of something else.
            RunStopped: the run did not come to its end.
        """
        trainer.train(self.config, self.folder, self.what)
        return _ask(self.folder, self.number, self.config.seed, self.num_ranks)


def _figures(models: Sequence[RunConfig]) -> list[ModelFigures]:
    from pretrain.data.tokenizer import ByteTokenizer

    return [model_figures(with_vocabulary_of(config, ByteTokenizer())) for config in models]


def _prepare(folder: Path, number: int, config: RunConfig) -> None:
    """Documents for one pass over the run, unless they are there."""
    from pretrain.data.manifest import MANIFEST_FILE
    from pretrain.data.prepare import prepare
    from pretrain.data.tokenizer import ByteTokenizer

    if (folder / MANIFEST_FILE).exists():
        return
    train = config.train
    letters = int(train.num_steps * train.tokens_per_step * (1 + 2 * _VALIDATION_FRACTION))
    source = folder.parent / f"{folder.name}.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    write_documents(source, documents(make_facts(number, config.seed), letters, train.sequence_length, config.seed))
    prepare([str(source)], folder, ByteTokenizer(), validation_fraction=_VALIDATION_FRACTION)
    source.unlink()


def _ask(folder: Path, number: int, seed: int, num_ranks: int) -> Recall:
    """Recall of the finished run in a folder; kept beside its checkpoint."""
    from parallel.launch import launch_ranks
    from pretrain.evaluation.recall import Recall
    from pretrain.run.saved_run import find_checkpoint

    saved = find_checkpoint(RunFolder(folder), None)
    kept = folder / _ANSWERS
    if kept.exists():
        content = json.loads(kept.read_text(encoding="utf-8"))
        if content.pop("step") == saved.step:
            return Recall(**content)
    facts = make_facts(number, seed)[:MOST_ASKED]
    found: Recall = launch_ranks(lambda: ask_rank(saved, facts), num_ranks)[0]
    kept.write_text(json.dumps({"step": saved.step, **asdict(found)}), encoding="utf-8")
    return found


def ask_rank(saved: SavedState, facts: Sequence[str]) -> Recall:
    """Ask on one rank."""
    from pretrain.data.tokenizer import ByteTokenizer
    from pretrain.engine.session import session
    from pretrain.evaluation.recall import recall
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


def table(figures: Sequence[ModelFigures], found: Mapping[str, Mapping[int, Recall]]) -> str:
    """Markdown: a row per model, and per number of facts the share that it knows and the nats of a value."""
    numbers = sorted({number for of_model in found.values() for number in of_model})
    rows = []
    for model in figures:
        unequal = inequalities(model, figures[0]).get("flops")
        cells = [model.name, f"{model.total / 1e6:.3f}M"]
        cells.append(f"{model.forward_flops_per_token / 1e6:.3f}" + (f" (**{unequal:+.1%}**)" if unequal else ""))
        for number in numbers:
            recalled = found[model.name].get(number)
            cells.append("not run" if recalled is None else f"{recalled.accuracy:.1%}, {recalled.nats:.2f}")
        rows.append(tuple(cells))
    head = ("model", "parameters", "forward MFLOPs per token", *(f"{number:,} facts" for number in numbers))
    return markdown_table(head, rows)


def report(
    config: RunConfig,
    figures: Sequence[ModelFigures],
    found: Mapping[str, Mapping[int, Recall]],
    *,
    plot_name: str,
    command: str,
) -> str:
    """The part of a report between its marks."""
    train = config.train
    return f"""\
{len(figures)} models, each trained on {train.num_steps * train.tokens_per_step:,} bytes of documents that state so many facts: \
{train.num_steps} steps of {train.global_batch_size} x {train.sequence_length}, weights and facts from seed {config.seed}. \
Then they are asked for the values of at most {MOST_ASKED:,} of them: the share whose value they know, and the nats that a value costs \
(guessing its two letters costs {GUESS_NATS:.2f}).

{table(figures, found)}

![Facts known]({plot_name})

Made by

```
{command}
```
"""


def plot(found: Mapping[str, Mapping[int, Recall]]) -> Figure:
    """Share of facts known, and nats of a value, against the number of facts: a line per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    known, nats = figure.subplots(1, 2)
    for axes in (known, nats):
        model_colours(axes)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        axes.set_xlabel("facts")
        axes.grid(alpha=0.4)
    for name, of_model in found.items():
        if of_model:
            numbers = sorted(of_model)
            known.plot(numbers, [of_model[number].accuracy for number in numbers], marker="o", markersize=4, label=name)
            nats.plot(numbers, [of_model[number].nats for number in numbers], marker="o", markersize=4)
    known.set_ylabel("share of facts known")
    known.set_ylim(0, 1)
    nats.set_ylabel("nats per value")
    nats.axhline(GUESS_NATS, color="grey", linestyle=":")
    nats.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
