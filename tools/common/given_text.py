"""Text that a person gives a command, in a file or on standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from pretrain.errors import ConfigError


def text_in(file: str, option: str) -> str:
    """The text of a file; of standard input, if the file is -.

    Args:
        option: the option that names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} is {file}, which cannot be read as UTF-8 text: {error}") from error
