"""Progress of long work: a bar where there is a terminal, and a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

EVERY_S = 10.0
"""Seconds between two lines in a file. The last one always comes."""


class Progress:
    """Progress on stderr, as a context manager or until `close`.

    On a terminal it is one line that is drawn again, cut to the terminal's width. In a file or a pipe every update is a
    line of its own, with the time, and without the characters that draw a bar.
    """

    def __init__(self, what: str, *, total: int, initial: int = 0, is_bytes: bool = False, leave: bool = True) -> None:
        """
        Args:
            what: noun for what is counted or done, as in "step".
            total: number of these.
            initial: number of these that were done before.
            is_bytes: the unit is a byte of a file, and the bar tells megabytes.
            leave: leave the bar on the terminal, and say that the work is done where there is none.
        """
        self._what, self._total, self._done, self._initial = what, total, initial, initial
        self._is_bytes, self._leave = is_bytes, leave
        self._note = ""
        self._started_s = self._told_s = time.monotonic()
        self._told = initial
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            counted = "{n_fmt}B/{total_fmt}B" if is_bytes else "{n_fmt}/{total_fmt}"
            self._bar = tqdm(
                total=total,
                initial=initial,
                unit_scale=is_bytes,
                mininterval=0.5,
                bar_format=f"{what} {counted} |{{bar:20}}| {{desc}}{{elapsed}} elapsed, {{remaining}} left",
                dynamic_ncols=True,
                leave=leave,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, number: int, note: str = "") -> None:
        """Count `number` more as done; the note is about now."""
        self._done, self._note = self._done + number, note
        if self._bar is not None:
            self._bar.set_description_str(f"{note} | " if note else "", refresh=False)
            self._bar.update(number)
        elif time.monotonic() >= self._told_s + EVERY_S:
            self._tell()

    def say(self, text: str) -> None:
        """Print a line between the others."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            # Progress from before the line is told before it.
            self._tell_news()
            self._print(text)

    def close(self) -> None:
        """End the progress, whether the work ended well or not."""
        if self._bar is not None:
            self._bar.close()
        elif self._leave:
            self._tell_news()

    def _tell_news(self) -> None:
        if self._done != self._told:
            self._tell()

    def _tell(self) -> None:
        self._told_s, self._told = time.monotonic(), self._done
        elapsed_s = self._told_s - self._started_s
        done = self._done - self._initial
        left = f", {_clock(elapsed_s / done * (self._total - self._done))} left" if done > 0 else ""
        counted = f"{self._done}/{self._total}"
        if self._is_bytes:
            counted = f"{self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB"
        note = f" | {self._note}" if self._note else ""
        self._print(f"{self._what} {counted}{note} | {_clock(elapsed_s)} elapsed{left}")

    def _print(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
