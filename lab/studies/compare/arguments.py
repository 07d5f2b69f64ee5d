"""Arguments that commands that train several models share: models, where the runs are, and the report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from lab.pages import Page
from lab.studies.compare.controls import MEANINGS
from pretrain.errors import ConfigError
from tools.common.parsers import positive
from tools.common.ranks import started_world_size


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds CONFIG; overrides that come after the options end up in `overrides`."""
    parser.add_argument(
        "configs",
        metavar="CONFIG",
        nargs="+",
        help="YAML files, the first being the reference; then key=value overrides",
    )
    parser.set_defaults(overrides=[])


def add_folders(parser: argparse.ArgumentParser, name: str, part: str) -> None:
    """Adds `--run-dir` and `--report` of the command of this name, whose part of a page is called `part`."""
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs") / name,
        metavar="DIR",
        help=f"folder of the runs (default: runs/{name})",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=f"markdown file to write, or to fill between its marks; the plot goes beside it (default: DIR/{part}.md)",
    )


def add_seeds(parser: argparse.ArgumentParser, default: tuple[int, ...], of_what: str) -> None:
    """Adds `--seeds`, which are of what is named."""
    words = ",".join(map(str, default))
    parser.add_argument(
        "--seeds", type=seed_list, default=default, metavar="N,N", help=f"seeds of {of_what} (default: {words})"
    )


def seed_list(text: str) -> tuple[int, ...]:
    """The value of `--seeds`."""
    seeds = tuple(int(part) for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice: the two runs would be the same")
    return seeds


def add_controls(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds `--controls`: the names of those that are asked for, all if none is named; empty without it.

    Args:
        what: purpose of the controls, as help says it.
    """
    parser.add_argument(
        "--controls",
        type=_control_list,
        nargs="?",
        default=(),
        const=tuple(MEANINGS),
        metavar="NAME,NAME",
        help=f"{what} (all without a name: {', '.join(MEANINGS)})",
    )


def _control_list(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in MEANINGS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(MEANINGS)}; configurations come before it")
    return tuple(name for name in MEANINGS if name in names)


def _controls_option(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return ["--controls"] if len(names) == len(MEANINGS) else ["--controls", ",".join(names)]


def add_at_once(parser: argparse.ArgumentParser) -> None:
    """Adds `--at-once`, for `run_side_by_side`. It changes no result, and is no part of a report's command."""
    parser.add_argument(
        "--at-once", type=positive, default=1, metavar="N", help="runs that train side by side (default: 1)"
    )


def refuse_launcher(name: str) -> None:
    """Refuse to run under torchrun or srun.

    Raises:
        ConfigError: a launcher started this process; the message names the command.
    """
    if started_world_size() is not None:
        raise ConfigError(
            f"`megamem {name}` starts its own ranks, one run after the other: call it without torchrun or srun"
        )


def open_page(args: argparse.Namespace, part: str) -> Page:
    """The page of the report, and its part of it.

    Raises:
        ConfigError: the page is there, and is none of ours.
    """
    page = Page(args.report or args.run_dir / f"{part}.md", part)
    page.check()
    return page


def command_line(args: argparse.Namespace, name: str, *options: str) -> str:
    """The command that makes the report again.

    Args:
        options: options that it has to itself, beside those of this file.
    """
    words = ["megamem", "study", name, *args.configs, *args.overrides, *options]
    words += ["--seeds", ",".join(map(str, args.seeds)), *_controls_option(args.controls)]
    words += ["--run-dir", str(args.run_dir)]
    words += ["--nproc", str(args.nproc)] if args.nproc else []
    words += ["--report", str(args.report)] if args.report else []
    return shlex.join(words)
