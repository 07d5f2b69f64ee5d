"""Commands that other distributions add to `megamem`, by entry points in their metadata."""

from __future__ import annotations

from importlib.metadata import entry_points

COMMANDS = "megamem.commands"
"""Group of entry points that name a sequence of modules of commands, in the order of `--help`."""
STUDIES = "megamem.studies"
"""Group of those of `megamem study`."""


def added_modules(group: str) -> tuple[str, ...]:
    """Modules of a group, distribution by distribution.

    A job runs a snapshot of the product, beside which no other's package lies: those add nothing there.
    """
    found: list[str] = []
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            found += entry.load()
        except ModuleNotFoundError as error:
            if not f"{entry.module}.".startswith(f"{error.name}."):
                raise
    return tuple(found)
