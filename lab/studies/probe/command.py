"""`megamem probe`: needles, key-value pairs, chains, turns and mappings, asked of trained runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.studies.probe.picture import draw, table
from lab.suite.plan import Answers, Cell, SuitePlan, cells
from lab.suite.tasks import TASKS
from parallel.machine.devices import num_visible_gpus
from parallel.machine.refusals import check_can_write
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate_layout
from pretrain.data.manifest import open_saved_tokenizer
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, note_edited_config, saved_config
from tools.common.parsers import add_command
from tools.common.ranks import add_nproc, current_rank_is_first, fewest_ranks, run_on_ranks, started_world_size
from tools.evaluate import check_data

_EPILOG = f"""\
examples:
  megamem study probe runs/quickstart --tasks needle,kv --samples 8
  megamem study probe runs/long --lengths 512,1024,4096 --depths 0,0.5,1 --nproc 8
  megamem study probe runs/short model.rotary_scaling.kind=ntk model.rotary_scaling.factor=4 --lengths 4096 --name stretched
  megamem study probe runs/short runs/long --lengths 1024,4096

Texts of a given number of tokens are made of the run's own held-out documents, with statements in between, and end with
a question about one of them: {", ".join(TASKS)}. An answer is exact if each of its tokens is
the likeliest one, given the true ones before it; it is chosen if its mean log-likelihood per token is above that of every
wrong answer. The texts follow from --seed; answers are the same on any layout, to rounding.

Answers go to NAME.json in each run's folder, the picture to NAME.png in the first one's. `megamem data synthetic` makes
documents of these tasks to train on: a small model learns to look back only if its data reward it.
"""
_OVERRIDABLE = ("model.rotary_", "train.kernels", "train.loss_chunk_tokens", "data.", "evaluation.datasets")
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SHARES_OF_A_SEQUENCE = (4, 2, 1)


def add_parser(subparsers: Any) -> None:
    """Adds `probe` to the commands of `megamem`."""
    parser = add_command(subparsers, "probe", "ask runs about facts in long contexts, by length and depth", _EPILOG)
    parser.add_argument(
        "words",
        metavar="RUN",
        nargs="+",
        help=f"run folders; then key=value overrides for all runs, of keys under {', '.join(_OVERRIDABLE)}",
    )
    parser.add_argument("--tasks", default=",".join(TASKS), metavar="T,T", help="tasks to ask (default: all)")
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        help="tokens of a text (default: a quarter, half and all of the first run's train.sequence_length)",
    )
    parser.add_argument(
        "--depths",
        default=",".join(f"{depth:g}" for depth in _DEPTHS),
        metavar="D,D",
        help="places of the answer, from 0, the beginning, to 1, next to the question (default: 0,0.25,0.5,0.75,1)",
    )
    parser.add_argument(
        "--samples", type=int, default=32, metavar="N", help="texts per task, length and depth (default: 32)"
    )
    parser.add_argument(
        "--wrong",
        type=int,
        default=3,
        metavar="N",
        help="wrong answers beside each right one, a text each; 0 asks for the right one alone (default: 3)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the texts (default: 1)")
    parser.add_argument("--name", default="probe", help="name of the files in the run folders (default: probe)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest complete one)"
    )
    add_nproc(parser, "one per GPU, or 2, or what --own-layout needs")
    parser.add_argument("--own-layout", action="store_true", help="use the layout that each run was trained on")
    parser.set_defaults(func=run_probe, overrides=[])


def run_probe(args: argparse.Namespace) -> int:
    """Asks one run after the other, prints tables, and draws one picture."""
    paths = [Path(word) for word in args.words if "=" not in word or Path(word).is_dir()]
    overrides = _overrides([*(word for word in args.words if Path(word) not in paths), *args.overrides])
    if not paths:
        raise ConfigError("no run is named: give the folder of one, as in `megamem probe runs/quickstart`")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is named twice: leave one of them out")
    if len(paths) > 1 and started_world_size() is not None:
        raise ConfigError("ranks that were started elsewhere ask one run: name one, or start the ranks with --nproc")
    plan, written = None, []
    for path in paths:
        folder = RunFolder(path)
        saved = find_checkpoint(folder, args.step)
        config = saved_config(saved, None if args.own_layout else ParallelConfig(), overrides)
        note_edited_config(folder, saved)
        plan = plan or _plan(args, config)
        num_ranks = started_world_size() or args.nproc or _num_ranks(config, own_layout=args.own_layout)
        _check(config, plan, num_ranks)
        check_data(config, folder, saved, moved=True)
        written.append(path / f"{args.name}.json")
        for file in (written[-1], *([_picture(paths, args)] if path == paths[0] else ())):
            check_can_write(file)
        asked = _Asked(config, folder, saved.path, plan, tuple(overrides), written[-1])
        if code := run_on_ranks(asked.on_rank, num_ranks):
            return code
    if current_rank_is_first():
        found = [Answers.read(path) for path in written]
        print("\n\n".join(map(table, found)))
        picture = _picture(paths, args)
        draw(found, picture)
        print(f"\nanswers: {', '.join(map(str, written))}\npicture: {picture}", flush=True)
    return 0


def _picture(paths: Sequence[Path], args: argparse.Namespace) -> Path:
    return paths[0] / f"{args.name}.png"


def _overrides(words: Sequence[str]) -> list[str]:
    for word in words:
        if not word.startswith(_OVERRIDABLE):
            raise ConfigError(
                f"{word} has no place here, where {', '.join(_OVERRIDABLE)} can be overridden: leave it out"
            )
    return list(words)


def _plan(args: argparse.Namespace, config: RunConfig) -> SuitePlan:
    def numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
        try:
            return sorted({kind(part) for part in text.split(",")})
        except ValueError as error:
            raise ConfigError(f"--{option} is {text}: give numbers with commas between them") from error

    length = config.train.sequence_length
    lengths = args.lengths or ",".join(str(max(1, length // share)) for share in _SHARES_OF_A_SEQUENCE)
    return SuitePlan(
        tuple(dict.fromkeys(args.tasks.split(","))),
        tuple(numbers("lengths", lengths, int)),
        tuple(numbers("depths", args.depths, float)),
        args.samples,
        args.wrong,
        args.seed,
    )


def _num_ranks(config: RunConfig, *, own_layout: bool) -> int:
    return fewest_ranks(config.parallel) if own_layout else num_visible_gpus() or 2


def _check(config: RunConfig, plan: SuitePlan, num_ranks: int) -> None:
    """Refuse a layout that the ranks cannot have, or that cannot cut the texts."""
    validate_layout(config, num_ranks)
    layout = config.parallel
    cut = layout.tensor * layout.context * (2 if layout.context > 1 else 1)
    if bad := [length for length in plan.lengths if length % cut]:
        raise ConfigError(
            f"--lengths has {bad[0]}, which this layout cannot cut into {cut} equal parts (parallel.tensor = "
            f"{layout.tensor}, parallel.context = {layout.context}): ask for {-(-bad[0] // cut) * cut}"
        )


class _Asked:
    """Questions to one run, and the place of the answers."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        checkpoint: Path,
        plan: SuitePlan,
        overrides: tuple[str, ...],
        file: Path,
    ) -> None:
        self.config, self.folder, self.checkpoint, self.plan = config, folder, checkpoint, plan
        self.overrides, self.file = overrides, file

    def on_rank(self) -> None:
        """Ask on one rank. The first one writes."""
        from pretrain.engine.session import session
        from pretrain.evaluation.restore import restore_model

        plan, longest = self.plan, max(self.plan.lengths)
        config = replace(self.config, train=replace(self.config.train, sequence_length=longest))
        with session(config) as groups:
            tokenizer = open_saved_tokenizer(self.folder.tokenizer)
            chunks = restore_model(config, self.checkpoint, tokenizer, groups)
            found = self._cells(chunks, groups)
            if groups.is_main:
                name = self.folder.path.resolve().name
                answers = Answers(name, str(self.checkpoint), self.overrides, plan.seed, plan.num_wrong, tuple(found))
                try:
                    answers.write(self.file)
                except OSError:
                    # Asking takes long.
                    print(table(answers), flush=True)
                    raise

    def _cells(self, chunks: Any, groups: Any) -> list[Cell]:
        from contextlib import nullcontext

        from lab.suite.ask import AnswerRows, ask
        from lab.suite.texts import Filler, Writer
        from pretrain.data.held_out import evaluated_parts
        from pretrain.progress import Progress

        train = self.config.train
        parts = [(dataset, split) for dataset, split, _ in evaluated_parts(self.config.evaluated)]
        writer = Writer(Filler(parts))
        rows = {length: AnswerRows(writer, self.plan, length) for length in self.plan.lengths}
        total = sum(map(len, rows.values()))
        found: list[Cell] = []
        with Progress("asking", total=total, leave=False) if groups.is_main else nullcontext() as bar:
            for length, of_length in rows.items():
                # As many tokens at once as in training.
                micro_batch_size = max(1, train.micro_batch_size * train.sequence_length // length)
                pipeline = self.config.parallel.pipeline
                scores = ask(chunks, of_length, groups, micro_batch_size=micro_batch_size, pipeline=pipeline, bar=bar)
                found += cells(self.plan, length, scores)
        return found
