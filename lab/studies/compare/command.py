"""`megamem compare`: tune several models alike, train them on the same tokens, and report them side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.studies.compare.arguments import (
    add_at_once,
    add_controls,
    add_folders,
    add_models,
    add_seeds,
    command_line,
    open_page,
    refuse_launcher,
)
from lab.studies.compare.comparison import Comparison
from lab.studies.compare.rules import (
    inequalities,
    load_configs,
    overrides_among,
)
from lab.studies.compare.runs import RunStopped
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from tools.common.ranks import add_nproc, default_num_ranks, fewest_ranks

_EPILOG = """\
examples:
  megamem study compare lab/configs/compare/*.yaml --nproc 2
  megamem study compare lab/configs/compare/*.yaml --tune lab/configs/tuning/small.yaml --nproc 2 --report lab/docs/comparison.md
  megamem study compare lab/configs/compare/dense.yaml lab/configs/compare/moe.yaml train.num_steps=50 --seeds 1,2,3 --run-dir runs/50
  megamem study compare lab/configs/upscale/small.yaml --grow lab/configs/upscale/growth.yaml --nproc 2 --run-dir runs/growth

Every model is trained with every seed, all models with the first seed first. The seeds are those of the weights;
tokens, batches and their order are the same in all runs (data.seed, or else the configuration's own seed). The run of a
model and a seed is in DIR/NAME/seed_N, a run folder as `megamem train` makes it. Finished runs are kept and interrupted
ones resumed: after Ctrl-C, run the same command again. The report is written after every run. A file named base.yaml,
on which others build, is left out. Overrides hold for all models.

With --tune, every model first gets the same number of shorter trials (DIR/NAME/trial_N) with a seed of their own: the
keys of the tuning file are gone through in its order, each value is tried with the best so far, and what is better
stays. Keys that none of these models reads are told and passed over. The runs that are reported have the best settings,
and the report lists all trials; of a search of one number it has a picture.

With --controls, every model with a memory is also trained without what makes it one: with one row for every read, with
rows that stay random, with the rows of other tokens; and as a dense model of equal operations, of equal parameters, and
as a mixture of experts of equal parameters (DIR/NAME.CONTROL/seed_N). Then the trained model is evaluated with rows of
other tokens and without its memory. The report gets a section with all losses, a picture, and a verdict per model. It
takes seven times as long, or less with the names of some: one_row,random_rows,others_rows,equal_flops decide. A control
that several models have in common, as a dense one of the same size and rates, is trained once, in the first one's folder.

With --target-loss, the report also says after how many tokens and seconds each model's validation loss reaches it, and
whether a model is faster than the first one: an exact test of paired seeds, which takes seven to go below p = 0.01.
Set evaluation.every_steps to a small part of the run. All models are trained with one seed before the next.

With --at-once N, N runs train side by side, each with its share of the cores and, where there are GPUs, with its ranks'
GPUs in turn. A search's trials stay in order, so N models are searched at once. What runs print is in logs/screen.log of
their folders, and in DIR/NAME/search.log.

With --grow, CONFIG is one model without a memory. It is trained with every seed (DIR/NAME/seed_N), grown in every way of
the file (DIR/NAME/seed_N/grown/WAY), and each of the grown models is trained on, on the same tokens (DIR/WAY/seed_N).
Overrides hold for both trainings.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `compare` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "compare",
        help="train models on the same tokens, tuned alike, and report them side by side",
        description="Train each configuration with each seed on the same tokens, and write a table and a plot of the "
        "results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_models(parser)
    add_seeds(parser, (2, 3, 4), "the weights")
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="first search each model's settings among the values of this file"
    )
    add_controls(parser, "train every model with a memory again without what makes it one")
    parser.add_argument(
        "--target-loss", type=float, metavar="NATS", help="also test which models reach this validation loss sooner"
    )
    add_at_once(parser)
    parser.add_argument(
        "--grow", type=Path, metavar="FILE", help="train the one CONFIG, then grow it in the ways of this file"
    )
    add_folders(parser, "compare", "comparison")
    add_nproc(parser, "as `megamem train`; with --at-once as few as the layout needs", what="ranks of each run")
    parser.set_defaults(func=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """Trains what is not there yet, and writes the report."""
    refuse_launcher("compare")
    if args.grow is not None:
        given = {
            "--controls": bool(args.controls),
            "--target-loss": args.target_loss is not None,
            "--at-once": args.at_once > 1,
        }
        if refused := [option for option, is_given in given.items() if is_given]:
            raise ConfigError(f"{refused[0]} does not go with --grow: leave one of them out")
        from lab.studies.compare.growth import run_growth

        return run_growth(args)
    configs = load_configs(args.configs, args.overrides)
    num_ranks = _num_ranks(configs, args.nproc, args.at_once)
    page = open_page(args, "comparison")
    options = ["--tune", str(args.tune)] if args.tune else []
    options += [] if args.target_loss is None else ["--target-loss", f"{args.target_loss:g}"]
    command = command_line(args, "compare", *options)
    comparison = Comparison(
        list(configs.values()),
        args.seeds,
        num_ranks,
        args.run_dir,
        page,
        command,
        controls=args.controls,
        target_loss=args.target_loss,
        at_once=args.at_once,
    )
    for model in comparison.figures:
        for name, departure in inequalities(model, comparison.figures[0]).items():
            print(f"warning: {model.name} has {departure:+.1%} {name} against {comparison.figures[0].name}", flush=True)
    try:
        if args.tune is not None:
            comparison.tune(list(configs), overrides_among(args.configs, args.overrides), args.tune)
        comparison.train()
        if args.controls:
            comparison.train_controls()
    except RunStopped as stopped:
        return stopped.exit_code
    return 0


def _num_ranks(configs: Mapping[str, RunConfig], nproc: int | None, at_once: int) -> int:
    """Number of ranks of each run; configurations by the paths of their files.

    Raises:
        ConfigError: the runs would have different numbers by default.
    """
    default = default_num_ranks if at_once == 1 else fewest_ranks
    wanted = {path: nproc or default(config.parallel) for path, config in configs.items()}
    if len(set(wanted.values())) > 1:
        raise ConfigError(
            "the models would run on different numbers of ranks, and their speeds would say nothing: choose one with "
            "--nproc (" + ", ".join(f"{path}: {number}" for path, number in wanted.items()) + ")"
        )
    return next(iter(wanted.values()))
