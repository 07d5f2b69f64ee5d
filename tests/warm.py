"""Imports that every rank would pay for by itself, made once in the process that forks them."""

from __future__ import annotations


def import_kernels_and_layers() -> None:
    """Import the layers of all families, and register the kernels with torch."""
    # Not at the top of the file, which conftest.py files import: Triton has to find that it is to interpret.
    from kernels.implementations import Implementation
    from kernels.select import select_kernels
    from megamem.families.registry import FAMILIES

    for family in FAMILIES.values():
        family.layer()
    implementations: tuple[Implementation, ...] = ("auto", "torch", "naive")
    for implementation in implementations:
        select_kernels(implementation)
