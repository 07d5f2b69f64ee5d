"""Words of commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pretrain.errors import StoppedEarly
from pretrain.printable import printable, printable_lines


def ending(message: object, exit_code: int) -> str:
    """The last line of a command that did not come to its end; one that stopped as it was asked to made no error."""
    return f"megamem: {'' if exit_code == StoppedEarly.exit_code else 'error: '}{printable_lines(message)}"


def plural(number: int, noun: str) -> str:
    """ "1 rank", "1,024 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_size(num_bytes: int) -> str:
    """ "512 B", "5.4 MB", "1.20 GB": powers of 1,000."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def count_in_millions(number: int) -> str:
    """ "12,345", "5.4M", "1.20B": as short as it can be without becoming 0."""
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e6:.1f}M" if number < 1e9 else f"{number / 1e9:.2f}B"


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> Iterator[str]:
    """Lines of a table whose columns are as wide as their widest cells, which stand left or right in them."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell, width in cells).rstrip()
