"""The `megamem` command: finds the subcommand, and turns what goes wrong into one paragraph and an exit code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import re
import select
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from parallel.devices import keep_cuda_out_of_this_process
from pretrain.errors import UserError
from pretrain.quiet import quiet_engine
from tools.ranks import end_ranks_that_wait
from tools.words import ending

COMMAND_MODULES = (
    "tools.train",
    "tools.replay",
    "tools.data",
    "tools.evaluate",
    "tools.probe.command",
    "tools.analyse.command",
    "tools.generate",
    "tools.tables",
    "tools.checkpoint.command",
    "tools.upscale",
    "tools.plot",
    "tools.report.command",
    "tools.status",
    "tools.submit",
    "tools.cancel",
    "tools.cluster",
    "tools.bench.command",
    "tools.plan.command",
    "tools.dryrun",
    "tools.check_plan",
    "tools.compare.command",
    "tools.recall",
    "tools.config",
    "tools.doctor",
    "tools.gpu_check.command",
)
"""In the order of `--help`. Each has `add_parser(subparsers)`, which sets `func(args) -> int`, and imports torch only
when that is called, so that `--help` is fast."""

TWO_WORD_COMMANDS = (
    *("bench step", "bench kernels", "bench context", "bench hardware", "bench generate", "bench tables"),
)

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_USAGE_ERROR = 2
# Words for what may be a path and is kept as text.
_PATHS = ("CONFIG", "DIR", "FILE", "INPUT", "OTHER", "PROFILE", "RUN", "SPEC")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments without the program's name; those of this process if None.

    Returns:
        The exit code: 0 finished, 2 configuration or usage, 3 data, 4 checkpoint, 75 stopped early, 130 interrupted,
        1 a defect.
    """
    quiet_engine()
    keep_cuda_out_of_this_process()
    args = argparse.Namespace()
    try:
        args = build_parser().parse_args(argv)
        code = int(args.func(args) or 0)
        sys.stdout.flush()
        return code
    except SystemExit as request:
        # From argparse, which exits with a number.
        return int(request.code or 0)
    except UserError as error:
        print(ending(error, error.exit_code), file=sys.stderr)
        end_ranks_that_wait(args, error)
        return error.exit_code
    except KeyboardInterrupt:
        print("megamem: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            return EXIT_BROKEN_PIPE
        traceback.print_exc()
        end_ranks_that_wait(args, error)
        return 1


def _join_two_words(argv: Sequence[str]) -> list[str]:
    """The arguments with the name of a command of two words as one, which argparse takes for the name of a command."""
    words = list(argv)
    return [" ".join(words[:2]), *words[2:]] if " ".join(words[:2]) in TWO_WORD_COMMANDS else words


def _stdout_is_closed() -> bool:
    """Whether the reader of our output went away (`| head`), as opposed to some other pipe that broke."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    # Python flushes once more at exit and would complain about it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = SuggestingParser(
        prog="megamem",
        description="Pretraining of memory-layer language models on Megatron-core.",
        epilog="`megamem COMMAND --help` explains a command. Exit codes: 0 finished, 2 configuration or usage, 3 data, "
        "4 checkpoint, 75 stopped early with a checkpoint saved (start it again to go on), 130 interrupted before "
        "there was anything to save, 1 anything else.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=", ".join(map(_version, ("megamem", "megatron-core", "torch"))),
        help="show the versions of megamem and its engine, and exit",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMAND_MODULES:
        importlib.import_module(name).add_parser(subparsers)
    return parser


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (not installed)"


class SuggestingParser(argparse.ArgumentParser):
    """Names the nearest command or option in its errors, takes `key=value` on either side of the options, and a leading
    `~` of a path for the home folder, which a shell does not expand in quotes and behind `=`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        is_path = action.type is Path or action.metavar in _PATHS
        return super()._get_value(action, os.path.expanduser(arg_string) if is_path else arg_string)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but settles here what is left over, because the options of this command are known here."""
        words = _join_two_words(sys.argv[1:] if args is None else args)
        parsed, extras = super().parse_known_args(words, namespace)
        # argparse gives `nargs="*"` only the first arguments in a row: `CONFIG --nproc 4 a=1` leaves `a=1` over.
        late = [extra for extra in extras if "=" in extra and not extra.startswith("-")]
        if late and hasattr(parsed, "overrides"):
            parsed.overrides = [*parsed.overrides, *late]
            extras = [extra for extra in extras if extra not in late]
        if extras:
            self.error("unrecognized arguments: " + " ".join(extras))
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Prints the message with the nearest valid word, and exits with 2."""
        hint = self._nearest(message)
        where = f"`{self.prog} --help` lists what there is."
        text = f"megamem: error: {message}{f': did you mean {hint}?' if hint else '.'} {where}"
        self.exit(_USAGE_ERROR, textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) + "\n")

    def _nearest(self, message: str) -> str | None:
        if choice := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message):
            words = [word.strip(" '") for word in choice[2].split(",")]
            return next(iter(difflib.get_close_matches(choice[1], words, n=1)), None)
        if override := re.search(r"unrecognized arguments: (?:.* )?--(\w+\.[\w.]+=\S+)", message):
            return override[1]
        if unknown := re.search(r"unrecognized arguments: (?:.* )?(--[\w-]+)", message):
            options = sorted(set(re.findall(r"--[\w-]+", self.format_help())))
            return next(iter(difflib.get_close_matches(unknown[1], options, n=1)), None)
        return None


if __name__ == "__main__":
    sys.exit(main())
