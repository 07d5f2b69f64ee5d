"""The commands of the command line, as its parser knows them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def commands_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[str]:
    """All commands below a parser that have none below them, as a person types them."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield " ".join(words)
    for group in groups:
        for name, child in group.choices.items():
            yield from commands_of(child, (*words, name))
