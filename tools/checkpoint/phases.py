"""Progress bars of work that has phases."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from pretrain.progress import Progress


class Phases:
    """One bar after the other, as a context manager."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __enter__(self) -> Phases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def start(self, what: str, num_bytes: int) -> Callable[[int], None]:
        """A phase begins, which ends the one before; returns what is told of its bytes."""
        self._close()
        self._bar = Progress(what, total=num_bytes, is_bytes=True)
        return self._bar.update

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
