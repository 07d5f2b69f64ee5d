"""`megamem status`: a line per run: how far it is, what it does, and when it was last heard of."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import yaml

from parallel.machine.refusals import describe_error
from pretrain.checkpoint.folder import newest_readable
from pretrain.errors import ConfigError
from pretrain.printable import printable
from pretrain.run.folder import RunFolder
from pretrain.run.metric_rows import note_bad_row, parse_row
from pretrain.train.health.memories import NUM_OBSERVED, describe_faults, figures_by_block, find_faults
from slurm.job_status import jobs_standing
from slurm.times import AttemptTimes, attempt_times
from tools.common.parsers import add_command
from tools.common.run_status import State, duration, find_runs, metrics_age_s, standing_of
from tools.common.words import aligned, count_in_millions

_EPILOG = """\
examples:
  megamem status
  megamem status runs/mine runs/other
  megamem status runs/recall --json
  megamem status runs/mine --attempts

A folder that is no run stands for all runs below it. States: new (nobody has started it); running; silent (its owner is
on another machine and has given no sign for a minute); queued (its Slurm job waits); starting (the job runs, its ranks
do not train yet); ending (its ranks train no longer); finished; stopped (as it was asked to, with a checkpoint);
cancelled; failed (with an error); killed (the process is gone without an end record); unknown (a run of an older
version). A submitted run also shows its job and what follows its last attempt. Only the last 2 MiB of the metrics are
read, so an older evaluation is not shown. Nothing is written.
"""

TAIL_BYTES = 2 << 20
"""Bytes at the end of a file of metrics that are looked at."""
_BLOCK_BYTES = 64 << 10
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class StatusLine:
    """Figures of a run in `megamem status`.

    Attributes:
        run: its folder.
        name: name in the configuration.
        step, num_steps: steps done, and to be done.
        tokens: tokens seen in training.
        loss, validation_loss: the newest ones, in nats per token.
        checkpoint: step of the newest complete checkpoint.
        state, detail: standing of the run (`tools.common.run_status.Standing`).
        metric_age_s: seconds since the metrics were written.
        stage: stage in which the last step was taken, in a run of stages.
        dropped_out: memories that have collapsed or are silent, in words.
    """

    run: str
    name: str
    step: int
    num_steps: int | None
    tokens: int
    loss: float | None
    validation_loss: float | None
    checkpoint: int | None
    state: State
    detail: str
    metric_age_s: float | None
    stage: str | None = None
    dropped_out: tuple[str, ...] = ()


def add_parser(subparsers: Any) -> None:
    """Adds `status` to the commands of `megamem`."""
    parser = add_command(subparsers, "status", "show how far runs are, and which of them are running", _EPILOG)
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="*",
        default=[Path("runs")],
        help="run folders, or folders that hold some (default: runs)",
    )
    parser.add_argument(
        "--attempts",
        action="store_true",
        help="show, for runs on a Slurm cluster, how long every attempt waited and took to start, and which steps it lost",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per run, or per attempt")
    parser.set_defaults(func=run_status)


def run_status(args: argparse.Namespace) -> int:
    """Looks, and prints."""
    problems: list[str] = []
    paths = [path for named in args.runs for path in find_runs(named, problems)]
    if args.attempts:
        of_paths = _of_each(paths, lambda path: [(path, each) for each in attempt_times(RunFolder(path))], problems)
        _print_attempts([each for of_path in of_paths for each in of_path], as_json=args.json)
    else:
        _print_lines(_of_each(paths, line_of, problems), as_json=args.json)
    if problems:
        # After the others, which one damaged run must not hide.
        raise ConfigError("; ".join(problems))
    return 0


def _of_each(paths: Sequence[Path], look: Callable[[Path], _Found], problems: list[str]) -> list[_Found]:
    """Results of a look at each of the runs; if one cannot be looked at, the reason goes into `problems`."""
    found = []
    for path in paths:
        try:
            found.append(look(path))
        except (ConfigError, OSError) as error:
            problems.append(describe_error(error))
    return found


def _print_lines(lines: Sequence[StatusLine], *, as_json: bool) -> None:
    if as_json:
        for line in lines:
            print(json.dumps(asdict(line)))
    elif lines:
        print(table(lines))
        for line in lines:
            for sentence in line.dropped_out:
                print(printable(f"{line.run}: {sentence}"))


def _print_attempts(found: Sequence[tuple[Path, AttemptTimes]], *, as_json: bool) -> None:
    if as_json:
        for path, each in found:
            print(json.dumps({"run": str(path), **asdict(each)}))
    else:
        head = ("run", "attempt", "job", "nodes", "ended", "waited", "to first step", "without steps", "steps lost")
        print("\n".join(aligned([head, *(_attempt_cells(path, each) for path, each in found)])))


def _attempt_cells(path: Path, times: AttemptTimes) -> tuple[str, ...]:
    return (
        str(path) if times.stage is None else f"{path} ({times.stage})",
        str(times.number),
        times.job,
        str(times.num_nodes),
        times.cause or "-",
        *("-" if each is None else duration(each) for each in (times.waited_s, times.start_s, times.down_s)),
        "-" if times.lost_steps is None else f"{times.lost_steps:,}",
    )


def line_of(path: Path) -> StatusLine:
    """Figures of a run, from one look at its folder.

    Raises:
        ConfigError: the run's configuration is damaged.
    """
    folder = RunFolder(path)
    name, num_steps = _configured(folder)
    step, evaluation = (newest_row(folder.metrics, key) for key in ("loss", "validation_loss"))
    last = step.get("step", 0)
    standing = standing_of(folder, last, num_steps)
    if (jobs := jobs_standing(folder)) is not None:
        standing = standing.with_jobs(jobs)
    return StatusLine(
        run=str(path),
        name=name,
        step=last,
        num_steps=num_steps,
        tokens=step.get("consumed_tokens", 0),
        loss=step.get("loss"),
        validation_loss=evaluation.get("validation_loss"),
        checkpoint=_newest_checkpoint(folder.checkpoints),
        state=standing.state,
        detail=standing.detail,
        metric_age_s=metrics_age_s(folder),
        stage=step.get("stage"),
        dropped_out=_dropped_out(folder.metrics),
    )


def _dropped_out(metrics: Path) -> tuple[str, ...]:
    observed = reversed(newest_rows(metrics, "output_std", NUM_OBSERVED))
    return tuple(describe_faults(find_faults(figures_by_block(row["memory"] for row in observed))).values())


def _configured(folder: RunFolder) -> tuple[str, int | None]:
    """The name and the number of steps; read without the checks of a configuration, which take a tenth of a second."""
    # The C loader, where PyYAML has it, is ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # A safe loader, whichever of the two it is.
        content = yaml.load(folder.config.read_bytes(), loader)
        stage = content.get("stage")
        num_steps = content["train"]["num_steps"] if stage is None else stage["run_steps"]
        return str(content["name"]), None if num_steps is None else int(num_steps)
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{folder.config} is not the configuration of a run: {error}. `megamem train` writes it anew"
        ) from error


def newest_row(metrics: Path, key: str) -> dict[str, Any]:
    """The last whole row with a key; empty if there is none in the last `TAIL_BYTES`."""
    return next(iter(newest_rows(metrics, key, 1)), {})


def newest_rows(metrics: Path, key: str, number: int) -> list[dict[str, Any]]:
    """The last whole rows with a key, the newest first, of the last `TAIL_BYTES`. Reads as little as it can."""
    try:
        with metrics.open("rb") as stream:
            return list(islice(_rows_with(key, stream, metrics), number))
    except FileNotFoundError:
        return []


def _rows_with(key: str, stream: BinaryIO, metrics: Path) -> Iterator[dict[str, Any]]:
    mark = json.dumps(key).encode() + b":"
    for line in _whole_lines(stream):
        if mark in line:
            try:
                yield parse_row(line, step=int)
            except ValueError as error:
                # Lines are not counted from the end.
                note_bad_row(f"{metrics}, near its end", error)


def _whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines in the last `TAIL_BYTES`, from the last one on, but for one that is being written."""
    start = end = stream.seek(0, os.SEEK_END)
    begun, ended = b"", False
    while start > 0 and end - start < TAIL_BYTES:
        length = min(_BLOCK_BYTES, start)
        start -= length
        stream.seek(start)
        begun, *lines = (stream.read(length) + begun).split(b"\n")
        if lines and not ended:
            # Behind the last end of a line there is nothing, or a row that is being written.
            lines.pop()
            ended = True
        yield from reversed(lines)
    if start == 0 and ended:
        yield begun


def _newest_checkpoint(folder: Path) -> int | None:
    """The step of the newest checkpoint whose files are all there; contents are not read."""
    saved = newest_readable(folder)
    return None if saved is None else saved.step


def table(lines: Sequence[StatusLine]) -> str:
    """The runs for a terminal, a line each."""
    header = ("run", "step", "tokens", "loss", "validation", "saved", "heard of", "state")
    return "\n".join(aligned([header, *(_cells(line) for line in lines)]))


def _cells(line: StatusLine) -> tuple[str, ...]:
    named = line.run if Path(line.run).name == line.name else f"{line.run} ({line.name})"
    total = "?" if line.num_steps is None else f"{line.num_steps:,}"
    return (
        named,
        f"{line.step:,}/{total}" + (f" ({line.stage})" if line.stage else ""),
        count_in_millions(line.tokens),
        _number(line.loss),
        _number(line.validation_loss),
        "-" if line.checkpoint is None else f"{line.checkpoint:,}",
        "-" if line.metric_age_s is None else f"{duration(line.metric_age_s)} ago",
        f"{line.state} ({line.detail})" if line.detail else line.state,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
