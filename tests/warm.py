"""Imports that every rank would pay for by itself, made once in the process that forks them."""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path


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


def import_commands() -> None:
    """Import the modules of all commands, what Megatron imports in a first step, and pydantic's view of the schema."""
    from pretrain.config.stages import load_config
    from tools.cli import build_parser

    build_parser()
    load_config(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
    for module in ("multi_token_prediction", "transformer_block"):
        import_module(f"megatron.core.transformer.{module}")
    # Forks would copy every page that a collection of garbage writes to.
    gc.collect()
    gc.freeze()
