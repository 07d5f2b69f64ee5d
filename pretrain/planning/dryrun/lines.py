"""The line of our code that calls, for whatever sees calls below PyTorch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[3]
# Folders of our code there.
_OURS = ("kernels", "megamem", "parallel", "pretrain", "slurm", "tests", "tools", "lab")
# Lines of the stand-ins, and of what passes calls on to DDP, cause nothing themselves.
_PASSING_ON = (__name__.rpartition(".")[0], "parallel.machine.cpu", "lab.stand_in", "pretrain.engine.parts")


@dataclass(frozen=True, order=True)
class CallSite:
    """A line that causes what is seen below PyTorch.

    Attributes:
        line: the innermost one of ours, `path:line` from the root of the repository.
        through: the innermost line of another package between it and PyTorch, or nothing.
    """

    line: str
    through: str = ""

    @property
    def source(self) -> str:
        """Owner of the code: the module of another package that is innermost, or the file of ours."""
        return (self.through or self.line).rpartition(":")[0]

    def __str__(self) -> str:
        return f"{self.line} ({self.through})" if self.through else self.line


def calling_line() -> CallSite:
    """The line of ours that is innermost on the stack, and the innermost one of another package further in."""
    frame, through = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_PASSING_ON):
            if path := our_path(frame.f_code.co_filename):
                return CallSite(f"{path}:{frame.f_lineno}", through)
            if not through and name.partition(".")[0] not in ("torch", "contextlib", "unittest"):
                through = f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return CallSite("nowhere", through)


@cache
def our_path(file: str) -> str | None:
    """Path of a source file from the root of the repository, or of the folder that our packages are installed in.

    None: the file is not ours.
    """
    path = Path(file)
    if not path.is_relative_to(_ROOT):
        return None
    path = path.relative_to(_ROOT)
    return path.as_posix() if path.parts[0] in _OURS else None
