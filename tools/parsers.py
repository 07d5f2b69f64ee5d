"""Commands as argparse has them."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(
    commands: Any, name: str, summary: str, epilog: str, description: str | None = None
) -> argparse.ArgumentParser:
    """A command whose epilog keeps its lines; without a description, the summary is one."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser
