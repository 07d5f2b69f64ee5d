"""Commands and their help, as a parser of the command line knows them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tools.common.parsers import command_groups


def commands_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[str]:
    """All commands below a parser that have none below them, as a person types them."""
    groups = command_groups(parser)
    if not groups:
        yield " ".join(words)
    for group in groups:
        for name, child in group.choices.items():
            yield from commands_of(child, (*words, name))


def help_pages(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Help of a parser and of all commands below it."""
    yield parser.format_help()
    for child in {id(child): child for group in command_groups(parser) for child in group.choices.values()}.values():
        yield from help_pages(child)
