"""The `megamem` program: it sees that our packages are ours before it imports one that another file may hide."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from megamem.packages import hidden_packages


def main(argv: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] | None = None) -> int:
    """Run the command line (`tools.cli.main`), or say which of its packages is hidden and end with 2."""
    if hidden := hidden_packages():
        print(f"megamem: error: {hidden}", file=sys.stderr)
        return 2
    # By its name: nothing below the command line imports it, and `tools` may be somebody else's until here.
    code: int = importlib.import_module("tools.cli").main(argv, parser)
    return code
