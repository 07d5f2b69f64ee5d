"""Errors that a user can cause and mend, with the exit codes that scripts rely on.

Every message names the thing, the value and the fix. Anything else that is raised is a defect of ours and ends with
exit code 1 and a traceback.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Self


class UserError(Exception):
    """Base of the errors that are reported in one paragraph, without a traceback."""

    exit_code = 1

    def saying(self, message: str) -> Self:
        """This error with another message, and all else that it carries."""
        other = copy(self)
        other.args = (message,)
        return other


class ConfigError(UserError, ValueError):
    """The configuration or the command line cannot work."""

    exit_code = 2


class DataError(UserError):
    """A corpus, a data set or a tokenizer is missing, damaged or does not fit."""

    exit_code = 3


class MissingDataError(DataError):
    """There is no such data set.

    Attributes:
        folder: folder that was looked in.
    """

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder

    def __reduce__(self) -> tuple[type[MissingDataError], tuple[str, Path]]:
        # Errors pass between ranks.
        return type(self), (str(self), self.folder)


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or used with this configuration."""

    exit_code = 4


class StoppedEarly(UserError):
    """The run was asked to stop and saved a checkpoint: start it again to go on."""

    exit_code = 75
