"""`megamem study teach`: what does it cost to teach a trained model new facts?"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from lab.pages import Page
from lab.studies.compare.arguments import add_at_once, add_folders, add_seeds, open_page, refuse_launcher
from lab.studies.compare.runs import RunStopped
from lab.studies.compare.side_by_side import Job, run_side_by_side
from lab.studies.teach.course import Course, Taught
from lab.studies.teach.facts import MAX_FACTS
from lab.studies.teach.lessons import Lesson, known_before
from lab.studies.teach.report import plot, report, table
from lab.studies.teach.ways import WAYS
from pretrain.config.schema import ParallelConfig
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config
from tools.common.drawing import svg
from tools.common.parsers import positive
from tools.common.ranks import import_engine

_EPILOG = f"""\
examples:
  megamem study teach runs/quickstart --seeds 1,2,3 --at-once 2
  megamem study teach runs/quickstart --ways full,rows --rates full=0.1 --rates rows=1 --batches 10 --run-dir runs/teach_on

Facts are names with codes of two letters, asked as prompts and answers. Every way teaches the same ones, as many steps, from
the run's newest checkpoint: {", ".join(WAYS)}. Rates are shares of the run's own; of lora and rows_sgd
they are rates. Then the model is asked for all facts, and for its own held-out text. `lora` trains peft's adapters on the
model exported for transformers. A lesson is in DIR/RUN/seed_S/WAY_RATE; finished ones are kept.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `teach` to the commands of `megamem study`."""
    parser = subparsers.add_parser(
        "teach",
        help="teach a trained model facts, in several ways, and see what it forgets",
        description="Teach trained models random facts by every way of training them, ask them, and draw what each way costs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of trained runs with a memory")
    parser.add_argument("--ways", type=_ways, default=tuple(WAYS), metavar="WAY,WAY", help="ways (default: all)")
    parser.add_argument(
        "--rates", type=_rates, action="append", default=[], metavar="WAY=R,R", help="rates of a way instead of its own"
    )
    for name, default, what in (
        ("facts", 1000, "facts to teach"),
        ("batches", 1, "batches in which they are taught, one after the other"),
        ("steps", 200, "steps for each batch"),
        ("batch-size", 8, "sequences of a step"),
        ("rows", 500, "rows of each table that a step trains, where a way chooses"),
        ("windows", 64, "held-out windows of each model's own text"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    add_seeds(parser, (1,), "facts and their order")
    add_at_once(parser)
    add_folders(parser, "teach", "teaching")
    parser.set_defaults(func=run_teach)


def _ways(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in WAYS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(WAYS)}")
    return names


def _rates(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, numbers = text.partition("=")
    _ways(name)
    rates = tuple(float(number) for number in numbers.split(","))
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates are above 0")
    return name, rates


def run_teach(args: argparse.Namespace) -> int:
    """Teaches what is not taught yet, and writes the report."""
    refuse_launcher("teach")
    names = [run.resolve().name for run in args.runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two runs have one name ({', '.join(names)}), and lessons are kept by it: rename one folder")
    if not args.batches <= args.facts <= MAX_FACTS:
        raise ConfigError(f"--facts is {args.facts}: give a number from --batches {args.batches} to {MAX_FACTS}")
    rates = {name: dict(args.rates).get(name, WAYS[name].rates) for name in args.ways}
    runs = [run.resolve() for run in args.runs]
    for run in runs:
        if saved_config(find_checkpoint(RunFolder(run), None), ParallelConfig()).model.memory is None:
            raise ConfigError(f"{run} is a model without memory, which has no rows to train")
    page = open_page(args, "teaching")
    course = Course(args.facts, args.batches, args.steps, args.batch_size, args.windows, args.rows)
    import_engine()
    plan = [
        Lesson.of(run, way, rate, seed, course, args.run_dir)
        for seed in args.seeds
        for run in runs
        for way, of_way in rates.items()
        for rate in of_way
    ]
    for run in runs:
        _count_reads(run, args.run_dir / run.name / "known.npz")
    for lesson in plan:
        lesson.prepare()
    before = {run.name: known_before(run, course.num_windows) for run in runs}
    found: dict[str, dict[tuple[str, float], list[Taught]]] = {run.name: {} for run in runs}
    try:
        if args.at_once > 1:
            jobs = [
                Job(each.what, each.folder / "screen.log", each.taught, course.num_steps * course.num_batches)
                for each in plan
                if each.result is None
            ]
            run_side_by_side(jobs, args.at_once, 1)
        for number, lesson in enumerate(plan, start=1):
            print(f"lesson {number} of {len(plan)}: {lesson.what}", flush=True)
            found[lesson.model.name].setdefault((lesson.way, lesson.rate), []).append(lesson.taught())
    except RunStopped as stopped:
        return stopped.exit_code
    _write(args, page, found, before, course)
    return 0


def _count_reads(run: Path, output: Path) -> None:
    """Count the reads of the run's own text, unless that is done."""
    from tools.cli import main

    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        if main(["patch", "counts", str(run), "--output", str(output), "--nproc", "1"]):
            raise ConfigError(f"reads of {run} could not be counted, see above")


def _write(
    args: argparse.Namespace,
    page: Page,
    found: dict[str, dict[tuple[str, float], list[Taught]]],
    before: dict[str, float],
    course: Course,
) -> None:
    options = ["--ways", ",".join(args.ways)]
    for name, of_way in args.rates:
        options += ["--rates", f"{name}={','.join(f'{rate:g}' for rate in of_way)}"]
    for name in ("facts", "batches", "steps", "batch_size", "rows", "windows"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    options += ["--seeds", ",".join(map(str, args.seeds)), "--run-dir", str(args.run_dir)]
    options += ["--report", str(args.report)] if args.report else []
    command = shlex.join(["megamem", "study", "teach", *map(str, args.runs), *options])
    text = report(found, before, course, args.seeds, page.plot.name, command)
    page.write(text, svg(plot(found, before, course)))
    print(f"\n{table(found, before)}\n\nreport: {page.path}\nplot: {page.plot}", flush=True)
