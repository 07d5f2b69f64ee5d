"""Commands and options as argparse has them."""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Callable
from typing import Any

_LINE = 119
"""Characters of a line of a description, as of an epilog's."""
_OVERRIDES = "set a key, as in optimizer.lr=3e-4, model.memory=null or data.datasets.0.path=DIR (the value is YAML)"


def command_groups(parser: argparse.ArgumentParser) -> list[Any]:
    """Groups of commands right below a parser, whose `choices` are parsers by name: one or none, as argparse has it."""
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def add_command(
    commands: Any, name: str, summary: str, epilog: str, description: str | None = None
) -> argparse.ArgumentParser:
    """A command whose epilog keeps its lines; without a description, the summary is one."""
    described = description or f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(described, _LINE, break_on_hyphens=False),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def run_of(module: str) -> Callable[[argparse.Namespace], int]:
    """`run` of a module that is imported when its command runs."""

    def run(args: argparse.Namespace) -> int:
        code: int = importlib.import_module(module).run(args)
        return code

    return run


def add_config(
    parser: argparse.ArgumentParser,
    config: str = "YAML file",
    overrides: str = _OVERRIDES,
    *,
    is_needed: bool = True,
) -> None:
    """Adds a configuration and its overrides, as `pretrain.config.stages.load_config` takes them; with what is said of
    each."""
    parser.add_argument("config", metavar="CONFIG", nargs=None if is_needed else "?", help=config)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=overrides)


def add_stage(parser: argparse.ArgumentParser, stage: str = "which stage of a run of stages") -> None:
    """Adds the option for `pretrain.config.stages.load_stage`."""
    parser.add_argument("--stage", metavar="NAME", help=stage)


def positive(text: str) -> int:
    """The value of an option that counts."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number
