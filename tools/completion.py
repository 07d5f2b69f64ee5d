"""`megamem --print-completion SHELL`: a script by which a shell completes commands, options and paths."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(parser: argparse.ArgumentParser, is_path: Callable[[argparse.Action], bool]) -> None:
    """Add the option to the parser of all commands.

    Args:
        is_path: tells whether a shell should offer files for an argument.
    """

    class PrintCompletion(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, __: object = None) -> None:
            # Only whoever asks for it waits for it.
            import shtab

            for action in _actions(parser):
                if is_path(action):
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
            print(shtab.complete(parser, shell))
            parser.exit()

    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help='print a script for tab completion, and exit: eval "$(megamem --print-completion bash)"; also zsh, tcsh',
    )


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for of_command in dict.fromkeys(action.choices.values()):
                yield from _actions(of_command)
