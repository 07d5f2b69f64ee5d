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
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megamem import start
from tools.common.added import COMMANDS, STUDIES, added_modules
from tools.common.parsers import add_command, command_groups
from tools.completion import add_completion

COMMAND_MODULES = (
    "tools.train",
    "tools.replay",
    "tools.data.command",
    "tools.evaluate",
    "tools.generate",
    "tools.serve",
    "tools.tables",
    "tools.checkpoint.command",
    "tools.patch.command",
    "tools.upscale",
    "tools.plot",
    "tools.report.command",
    "tools.status",
    "tools.submit",
    "tools.cancel",
    "tools.cluster",
    "tools.plan.command",
    "tools.dryrun",
    "tools.config.command",
    "tools.doctor",
)
"""Modules of the commands, in the order of `--help`. Each has `add_parser(subparsers)`, which sets `func(args) -> int`,
and imports torch only when that is called, so that `--help` is fast. Those of other distributions follow them."""

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_USAGE_ERROR = 2
# Words for what may be a path and is kept as text.
_PATHS = ("CONFIG", "DIR", "FILE", "INPUT", "OTHER", "PROFILE", "RUN", "SPEC")
# By what Python says of text that is none.
_NUMBERS = {"invalid literal for int()": "a whole number", "could not convert string to float": "a number"}
_ADDED_BY = "pip install ./lab"
_CLOSED_STDOUT = "standard output is closed: send it to a file (> FILE), or nowhere (> /dev/null)"


def main(argv: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments without the program's name; those of this process if None.
        parser: builds the parser of another program; None: of `megamem`.

    Returns:
        The exit code: 0 finished, 2 configuration or usage, or what the system refuses, 3 data, 4 checkpoint, 75 stopped
        early, 130 interrupted, 1 a defect.
    """
    # Imported when `megamem.start` has put our packages first.
    from parallel.machine.devices import keep_cuda_out_of_this_process
    from parallel.machine.refusals import refusal
    from pretrain.errors import UserError
    from tools.common.quiet import quiet_engine
    from tools.common.ranks import end_ranks_that_wait
    from tools.common.words import ending

    if _without_stdout():
        print(f"megamem: error: {_CLOSED_STDOUT}", file=sys.stderr)
        return _USAGE_ERROR
    quiet_engine()
    keep_cuda_out_of_this_process()
    args = argparse.Namespace()
    try:
        try:
            args = (parser or build_parser)().parse_args(argv)
            code = int(args.func(args) or 0)
        except SystemExit as request:
            # From argparse, which exits with a number.
            code = int(request.code or 0)
        sys.stdout.flush()
        return code
    except UserError as error:
        said = _with_names_on_one_line(f"{error}{_advice(error, args)}", sys.argv[1:] if argv is None else argv)
        print(ending(said, error.exit_code), file=sys.stderr)
        end_ranks_that_wait(args, error)
        return error.exit_code
    except KeyboardInterrupt:
        print("megamem: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_went_away():
            return EXIT_BROKEN_PIPE
        refused = refusal(error)
        if refused is None:
            traceback.print_exc()
        else:
            said = _with_names_on_one_line(refused.message, sys.argv[1:] if argv is None else argv)
            print(ending(said, refused.exit_code), file=sys.stderr)
        end_ranks_that_wait(args, error)
        return 1 if refused is None else refused.exit_code
    finally:
        _leave_what_stdout_refuses()


def _with_names_on_one_line(message: str, words: Sequence[str]) -> str:
    """A message with the line breaks of the command's own words as escapes: those that are left are the message's."""
    from pretrain.printable import printable

    for word in words:
        for name in (word, word.partition("=")[2]):
            if len(name.splitlines()) > 1:
                message = message.replace(name, printable(name))
    return message


def _advice(error: Exception, args: argparse.Namespace) -> str:
    """A sentence for an error that does not know the arguments, with a space before it; as a rule empty."""
    from pretrain.errors import MissingDataError

    if not isinstance(error, MissingDataError):
        return ""
    from tools.common.missing_data import advice_on_path

    one, several = getattr(args, "config", None), getattr(args, "configs", ())
    return advice_on_path(error, [*map(str, several), *([] if one is None else [str(one)])])


def _without_stdout() -> bool:
    """True if standard output was closed before this process began (`>&-`), where Python's `print` says nothing at all.

    Standard input and error go nowhere from here on if they are closed. Else the next file that is opened would be in
    their place, and whatever is printed would go there.
    """
    for descriptor in (0, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)
            if opened != descriptor:
                os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    return sys.stdout is None


def _join_two_words(argv: Sequence[str], names: Container[str]) -> list[str]:
    """The arguments with the name of a command of two words as one, which argparse takes for the name of a command."""
    words = list(argv)
    return [" ".join(words[:2]), *words[2:]] if " ".join(words[:2]) in names else words


def _reader_went_away() -> bool:
    """True if the reader of our output went away (`| head`), as opposed to some other pipe that broke."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _leave_what_stdout_refuses() -> None:
    """Python writes what is left once more at exit, and would complain about it."""
    from parallel.machine.refusals import stdout_refuses

    if sys.stdout is not None and stdout_refuses():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def build_parser(commands: Sequence[str] | None = None, studies: Sequence[str] | None = None) -> SuggestingParser:
    """The parser with every command.

    Args:
        commands: modules of commands behind the product's own; None: those that installed distributions add.
        studies: modules of the commands of `megamem study`; likewise.
    """
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
    add_completion(parser, _is_path)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in (*COMMAND_MODULES, *(added_modules(COMMANDS) if commands is None else commands)):
        importlib.import_module(name).add_parser(subparsers)
    parser.studies = _add_study(subparsers, added_modules(STUDIES) if studies is None else studies)
    if not parser.studies:
        parser.elsewhere = f" The laboratory has more: `{_ADDED_BY}`, in a checkout of megamem."
    return parser


def _add_study(subparsers: Any, modules: Sequence[str]) -> tuple[str, ...]:
    """Adds `study` with the commands of some modules, and returns their names. Without any it says how to have some."""
    summary = "compare, time and analyse models: `megamem study --help` lists the studies"
    if not modules:
        study = add_command(
            subparsers,
            "study",
            summary,
            f"`{_ADDED_BY}`, in a checkout of megamem, adds the laboratory.",
            "Studies of models are the laboratory's, which is not installed. Training needs none of them.",
        )
        study.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        study.set_defaults(func=_study_nothing)
        return ()
    study = add_command(
        subparsers,
        "study",
        summary,
        "`megamem study STUDY --help` explains a study.",
        "Studies of models. Training needs none of them.",
    )
    studies = study.add_subparsers(dest="study", metavar="STUDY", required=True)
    for name in modules:
        importlib.import_module(name).add_parser(studies)
    return tuple(studies.choices)


def _study_nothing(_: argparse.Namespace) -> NoReturn:
    from pretrain.errors import ConfigError

    raise ConfigError(
        f"`megamem study` is the laboratory's, which is not installed: `{_ADDED_BY}`, in a checkout of megamem, adds it"
    )


def _is_path(action: argparse.Action) -> bool:
    return action.type is Path or action.metavar in _PATHS


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (not installed)"


class SuggestingParser(argparse.ArgumentParser):
    """Names the nearest command or option in its errors, takes `key=value` on either side of the options, and a leading
    `~` of a path for the home folder, which a shell does not expand in quotes and behind `=`."""

    studies: tuple[str, ...] = ()
    """Names that stand for `study NAME`, in the parser of all commands; none without the laboratory."""
    elsewhere: str = ""
    """Sentence behind the refusal of a name that is no command's, with a space before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        is_path = _is_path(action)
        try:
            return super()._get_value(action, os.path.expanduser(arg_string) if is_path else arg_string)
        except argparse.ArgumentError as error:
            # argparse names the function that reads the value, which is no word for a person.
            wanted = _NUMBERS.get(str(error.__context__).partition(":")[0].partition(" with ")[0])
            if wanted is None:
                raise
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {wanted}") from error

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but settle here what is left over: the options of this command are known here."""
        words = _join_two_words(sys.argv[1:] if args is None else args, self._names())
        if words[:1] and words[0] in self.studies:
            words = ["study", *words]
        parsed, extras = super().parse_known_args(words, namespace)
        # argparse gives `nargs="*"` only the first arguments in a row: `CONFIG --nproc 4 a=1` leaves `a=1` over.
        late = [extra for extra in extras if "=" in extra and not extra.startswith("-")]
        if late and hasattr(parsed, "overrides"):
            parsed.overrides = [*parsed.overrides, *late]
            extras = [extra for extra in extras if extra not in late]
        if extras:
            self.error("unrecognized arguments: " + " ".join(extras))
        return parsed, []

    def _names(self) -> set[str]:
        """Names of this parser's commands."""
        return {*self.studies, *(name for group in command_groups(self) for name in group.choices)}

    def _print_message(self, message: str, file: Any = None) -> None:
        # As argparse does, which keeps to itself that nobody could be told.
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """Prints the message with the nearest valid word, and exits with 2."""
        from pretrain.printable import printable

        hint = self._nearest(message)
        where = f"`{self.prog} --help` lists what there is."
        if "invalid choice" in message:
            where += self.elsewhere
        text = f"megamem: error: {printable(message)}{f': did you mean {hint}?' if hint else '.'} {where}"
        self.exit(_USAGE_ERROR, textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) + "\n")

    def _nearest(self, message: str) -> str | None:
        if choice := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message):
            words = [*(word.strip(" '") for word in choice[2].split(",")), *self.studies]
            return next(iter(difflib.get_close_matches(choice[1], words, n=1)), None)
        if override := re.search(r"unrecognized arguments: (?:.* )?--(\w+\.[\w.]+)[= ](\S+)", message):
            return f"{override[1]}={override[2]}"
        if unknown := re.search(r"unrecognized arguments: (?:.* )?(--[\w-]+)", message):
            options = sorted(set(re.findall(r"--[\w-]+", self.format_help())))
            return next(iter(difflib.get_close_matches(unknown[1], options, n=1)), None)
        return None


if __name__ == "__main__":
    sys.exit(start.main())
