"""Texts in a batch script: quoted for whoever reads them, or refused. No text enters a script but through this module.

Two programs read a script by different rules. bash has words as `shlex.quote` writes them. sbatch reads the lines that
begin with #SBATCH by itself: words end at white space, both kinds of quotes hold them together, a backslash takes away
the meaning of the next character everywhere, and # outside of quotes ends the line. For both a newline ends a comment or
a directive, whatever is around it, and what followed would run as a command on the node.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError

_MOST_BYTES = 4096
# Everything else is put between quotes, whose meaning has not changed from one Slurm to the next.
_PLAIN_FOR_SBATCH = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def unfit(text: str) -> str:
    """Reason why no batch script can hold a text, in words; empty if one can."""
    for letter in text:
        if not letter.isprintable():
            return f"a batch script cannot hold the character {letter!r}"
    if (length := len(text.encode())) > _MOST_BYTES:
        return f"its {length:,} bytes are more than the {_MOST_BYTES:,} that sbatch reads"
    return ""


def refuse_unfit(owner: Any) -> None:
    """Look at all texts of a configuration object, but not of those within it.

    Raises:
        ValueError: a text is one that no script can hold; the message names its field.
    """
    for field in fields(owner):
        value = getattr(owner, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (reason := unfit(text)):
                raise ValueError(f"{field.name} has {text[:200]!r}: {reason}. Use letters, digits, signs and spaces")


def shell_word(what: str, text: object) -> str:
    """One word of bash, which stands for exactly this text.

    Args:
        what: name of the thing, for messages.

    Raises:
        ConfigError: no script can hold the text.
    """
    return shlex.quote(_fit(what, text))


def quoted_word(what: str, text: object) -> str:
    """One word of bash, between quotes where it needs none: in an array, shellcheck takes bare commas for a mistake."""
    return "'" + _fit(what, text).replace("'", "'\"'\"'") + "'"


def comment(what: str, text: object) -> str:
    """A comment of bash, up to the end of its line."""
    return f"# {_fit(what, text)}"


def directive(option: str) -> str:
    """A line that gives sbatch one option, as `--name=value` or `--name`, with exactly this value."""
    text = _fit("an option of sbatch", option)
    if _PLAIN_FOR_SBATCH.fullmatch(text):
        return f"#SBATCH {text}"
    name, sign, value = text.partition("=")
    if not sign or not _PLAIN_FOR_SBATCH.fullmatch(name):
        raise ConfigError(f"{text!r} is no option of sbatch: write --name=value")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH {name}="{escaped}"'


def log_folder(what: str, path: Path) -> Path:
    """A folder in which Slurm is to write logs, whose names it takes for patterns.

    Raises:
        ConfigError: Slurm would write elsewhere.
    """
    for letter in "%\\":
        if letter in _fit(what, path):
            raise ConfigError(
                f"{what} is {path}, and Slurm reads {letter} in the path of a log as the start of a pattern: use a path "
                "without it"
            )
    return path


def _fit(what: str, value: object) -> str:
    text = str(value)
    if reason := unfit(text):
        raise ConfigError(f"{what} is {text[:200]!r}: {reason}. Use letters, digits, signs and spaces")
    return text
