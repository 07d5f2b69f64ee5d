"""`megamem compare`: train several models on the same tokens, one after the other, and report them side by side."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.loader import load_config
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.errors import CheckpointError, ConfigError
from tools.comparison import (
    ModelFigures,
    RunResult,
    check_comparable,
    check_report,
    inequalities,
    model_figures,
    plot,
    read_result,
    report,
    svg,
    table,
    with_seed,
    write_report,
)
from tools.ranks import add_nproc, default_num_ranks, import_engine, run_on_ranks, started_world_size
from tools.train import train_rank

if TYPE_CHECKING:
    from pretrain.run import RunFolder

BASE_FILE = "base.yaml"
"""A file of this name is what others build on, and no model; it may be among those named (`configs/compare/*.yaml`)."""

_EPILOG = """\
examples:
  megamem compare configs/compare/*.yaml --nproc 2
  megamem compare configs/compare/*.yaml --nproc 2 --report docs/comparison.md
  megamem compare configs/compare/dense.yaml configs/compare/moe.yaml train.num_steps=50 --seeds 1,2,3 --run-dir runs/50

Every model is trained with every seed, all models with the first seed first. The seeds are those of the weights;
tokens, batches and their order are the same in all runs (data.seed, or else the configuration's own seed). The run of a
model and a seed is in DIR/NAME/seed_N, a run folder as `megamem train` makes it. Finished runs are kept and interrupted
ones resumed: after Ctrl-C, run the same command again. The report is written after every run. A file named base.yaml is
what others build on, and is left out. Overrides hold for all models.
"""

# What may have changed since a run was made, because it moves no loss but by rounding.
_FREE_KEYS = ("name", "parallel.", "checkpoint.", "logging.", "data.num_workers", "train.kernel")


@dataclass(frozen=True)
class PlannedRun:
    """One model with one seed; its newest checkpoint lacks `steps_left` steps."""

    config: RunConfig
    folder: RunFolder
    steps_left: int


def add_parser(subparsers: Any) -> None:
    """Adds `compare` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "compare",
        help="train models on the same tokens, and report them side by side",
        description="Train each configuration with each seed on the same tokens, and write a table and a plot of what "
        "came out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "configs",
        metavar="CONFIG",
        nargs="+",
        help="YAML files, the first being the reference; then key=value overrides",
    )
    parser.add_argument(
        "--seeds", type=seed_list, default=(1, 2), metavar="N,N", help="seeds of the weights (default: 1,2)"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/compare"),
        metavar="DIR",
        help="folder of the runs (default: runs/compare)",
    )
    add_nproc(parser, "as `megamem train`")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="markdown file to write, or to fill between its marks; the plot goes beside it (default: "
        "DIR/comparison.md)",
    )
    # Overrides that come after the options end up here.
    parser.set_defaults(func=run_compare, overrides=[])


def seed_list(text: str) -> tuple[int, ...]:
    """The value of `--seeds`."""
    seeds = tuple(int(part) for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice: the two runs would be the same")
    return seeds


def run_compare(args: argparse.Namespace) -> int:
    """Trains what is not there yet, and writes the report."""
    if started_world_size() is not None:
        raise ConfigError(
            "`megamem compare` starts its own ranks, one run after the other: call it without torchrun or srun"
        )
    configs = load_configs(args.configs, args.overrides)
    num_ranks = _num_ranks(configs, args.nproc)
    for config in configs.values():
        for seed in args.seeds:
            validate(with_seed(config, seed), num_ranks)
    path = args.report or args.run_dir / "comparison.md"
    check_report(path)
    import_engine()
    from pretrain.run import RunFolder

    models = list(configs.values())
    figures = _figures(models)
    for model in figures:
        for name, departure in inequalities(model, figures[0]).items():
            print(f"warning: {model.name} has {departure:+.1%} {name} against {figures[0].name}", flush=True)
    # Every folder is looked at before the first run starts, so that one that holds another comparison is found at once.
    plan = [
        _plan_run(with_seed(config, seed), RunFolder(args.run_dir / config.name / f"seed_{seed}"))
        for seed in args.seeds
        for config in models
    ]

    def write() -> dict[str, list[RunResult]]:
        results: dict[str, list[RunResult]] = {}
        for run in plan:
            if (result := read_result(run.folder.metrics, run.config)) is not None:
                results.setdefault(run.config.name, []).append(result)
        text = report(
            models, figures, results, seeds=args.seeds, plot_name=path.with_suffix(".svg").name, command=_command(args)
        )
        write_report(path, text, svg(plot(figures, results)))
        return results

    code = _train_all(plan, num_ranks, write)
    if code == 0:
        print(f"\n{table(figures, write())}\n\nreport: {path}\nplot: {path.with_suffix('.svg')}", flush=True)
    return code


def load_configs(words: Sequence[str], late_overrides: Sequence[str] = ()) -> dict[str, RunConfig]:
    """The models by the paths of their files, in the order given.

    Args:
        words: paths, and overrides among them.
        late_overrides: more of those.

    Raises:
        ConfigError: there is no model, a file cannot be loaded, or they are not comparable.
    """
    overrides = [*(word for word in words if "=" in word), *late_overrides]
    if any(word.startswith("seed=") for word in overrides):
        raise ConfigError("seed is what --seeds sets: use that, or data.seed for another order of the data")
    paths = dict.fromkeys(word for word in words if "=" not in word and Path(word).name != BASE_FILE)
    if not paths:
        raise ConfigError(f"nothing to compare: name at least one CONFIG (files named {BASE_FILE} are left out)")
    configs = {path: load_config(path, overrides) for path in paths}
    check_comparable(configs)
    return configs


def _num_ranks(configs: Mapping[str, RunConfig], nproc: int | None) -> int:
    wanted = {path: nproc or default_num_ranks(config.parallel) for path, config in configs.items()}
    if len(set(wanted.values())) > 1:
        raise ConfigError(
            "the models would run on different numbers of ranks, and their speeds would say nothing: choose one with "
            "--nproc (" + ", ".join(f"{path}: {number}" for path, number in wanted.items()) + ")"
        )
    return next(iter(wanted.values()))


def _figures(models: Sequence[RunConfig]) -> list[ModelFigures]:
    """The formulas' figures, for which the data has to be there: its tokenizer says how many rows the embedding has."""
    from pretrain.data.dataset import check_blend
    from pretrain.run import model_vocab_size

    tokenizer = check_blend(models[0].data.datasets)
    return [model_figures(config, model_vocab_size(config.model, tokenizer)) for config in models]


def _plan_run(config: RunConfig, folder: RunFolder) -> PlannedRun:
    """Raises CheckpointError if the folder holds a run of something else."""
    from pretrain.checkpoint.folder import newest_complete
    from pretrain.config.loader import from_dict
    from pretrain.run import config_changes

    saved, _ = newest_complete(folder.checkpoints)
    if saved is None:
        return PlannedRun(config, folder, config.train.num_steps)
    before = from_dict(saved.config, f"the configuration in {saved.path}")
    changes = [text for key, text in config_changes(before, config).items() if not key.startswith(_FREE_KEYS)]
    if changes:
        raise CheckpointError(
            f"{folder.path} holds a run of another comparison: {'; '.join(changes)}. Set it back, or use another "
            "--run-dir"
        )
    return PlannedRun(config, folder, config.train.num_steps - saved.step)


def _train_all(plan: Sequence[PlannedRun], num_ranks: int, write: Callable[[], object]) -> int:
    """Trains what is left of every run, and calls `write` after each.

    Returns:
        The exit code of the first run that did not finish, or 0.
    """
    steps, seconds = 0, 0.0
    for index, run in enumerate(plan):
        place = f"run {index + 1} of {len(plan)}: {run.config.name}, seed {run.config.seed}"
        if run.steps_left <= 0:
            print(f"{place}: finished", flush=True)
            continue
        remaining = time_left(steps, seconds, sum(max(0, later.steps_left) for later in plan[index:]))
        print(f"{place}: {run.steps_left} steps to go; {remaining} for this and the runs after it", flush=True)
        started = time.monotonic()
        code = run_on_ranks(partial(train_rank, run.config, run.folder, quiet=True), num_ranks, log_dir=run.folder.logs)
        if code != 0:
            return code
        steps, seconds = steps + run.steps_left, seconds + time.monotonic() - started
        write()
    return 0


def time_left(steps_done: int, seconds: float, steps_to_go: int) -> str:
    """How long the rest takes at the mean speed so far, in words."""
    if steps_done == 0:
        return "time not known yet"
    minutes = seconds / steps_done * steps_to_go / 60
    return f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"


def _command(args: argparse.Namespace) -> str:
    """The command that makes the report again."""
    words = ["megamem", "compare", *args.configs, *args.overrides, "--seeds", ",".join(map(str, args.seeds))]
    words += ["--run-dir", str(args.run_dir)]
    words += ["--nproc", str(args.nproc)] if args.nproc else []
    words += ["--report", str(args.report)] if args.report else []
    return shlex.join(words)
