"""This machine's processor, as Linux describes it."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def instruction_set() -> str:
    """Extensions that its cores have, as words in one line: what `-march=native` compiles for."""
    return _line("flags", "features") or platform.processor()


def processor_name() -> str:
    """Its model, or its architecture where Linux does not tell."""
    return _line("model name").partition(":")[2].strip() or platform.machine()


def multiplies_bf16() -> bool:
    """True if its cores have instructions that multiply matrices of bf16: AMX of x86, BF16 of Arm."""
    return not {"amx_bf16", "bf16"}.isdisjoint(instruction_set().split())


def _line(*beginnings: str) -> str:
    """The first line of /proc/cpuinfo that begins so; empty if there is none."""
    lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines() if _CPUINFO.exists() else []
    return next((line for line in lines if line.lower().startswith(beginnings)), "")
