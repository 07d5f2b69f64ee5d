"""Text of files, tensors and other people, as a terminal may show it."""

from __future__ import annotations


def printable(text: object, most: int | None = None) -> str:
    """A name on one line: line breaks, escape sequences, half surrogates and all else that no font shows, as escapes.

    Args:
        text: the name.
        most: characters of it to show; None: all.
    """
    shown = str(text)
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else _escaped(letter) for letter in shown)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 3]}..."


def printable_lines(text: object) -> str:
    """A text with line breaks of its own, such as a message; all else that no font shows, as escapes."""
    return "\n".join(map(printable, str(text).split("\n")))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
