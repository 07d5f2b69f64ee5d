"""The `megamem` program: it puts our packages first before it imports one whose name another has, too."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence

from megamem.packages import put_ours_first


def main(argv: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] | None = None) -> int:
    """Run the command line (`tools.cli.main`)."""
    put_ours_first()
    # By its name: nothing below the command line imports it.
    code: int = importlib.import_module("tools.cli").main(argv, parser)
    return code
