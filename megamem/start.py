"""The `megamem` program: it sees that our packages are ours before it imports one that another file may hide."""

from __future__ import annotations

import importlib
import sys

from megamem.packages import hidden_packages


def main() -> int:
    """Run the command line, or say which of its packages is hidden and end with 2."""
    if hidden := hidden_packages():
        print(f"megamem: error: {hidden}", file=sys.stderr)
        return 2
    # By its name: nothing below the command line imports it, and `tools` may be somebody else's until here.
    code: int = importlib.import_module("tools.cli").main()
    return code
