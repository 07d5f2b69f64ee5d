"""The page that a check ends in."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kernels.processor import processor_name
from lab.gpu_check.judge import Verdict
from parallel.machine.devices import gpu_links, gpu_names

_PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "deepspeed", "numpy")


_TO_SEND = (
    "## What to send us",
    "",
    "This page, as it is, in an issue of the repository, with a line about the machine that it does not know: rented or",
    "your own, adapters per GPU, what else ran on it. It holds no texts, weights, paths of data or names of hosts. Of most",
    "use are, in this order: the order of streams, if it failed; a step as predicted and as measured, with this machine's",
    "figures; the kernels' shares of a copy; whether a resumed run has the same bits.",
)


@dataclass(frozen=True)
class Output:
    """Output of a command."""

    title: str
    command: str
    text: str


def page(verdicts: Sequence[Verdict], outputs: Sequence[Output], *, minutes: float) -> str:
    """All of it in Markdown: machine, what differs, every figure, and what commands printed."""
    counts = Counter(verdict.state for verdict in verdicts)
    said = ", ".join(f"{counts[state]} {state}" for state in ("ok", "differs", "failed", "skipped") if counts[state])
    bad = [verdict for verdict in verdicts if verdict.state in ("differs", "failed")]
    lines = ["# GPU check", "", f"{said}, in {minutes:.1f} minutes.", "", *_machine(), ""]
    lines += [*_TO_SEND, ""]
    if bad:
        lines += ["## What differs", "", *(f"- **{verdict.name}**: {verdict.text}" for verdict in bad), ""]
    lines += ["## All checks", "", "| check | | |", "| --- | --- | --- |"]
    lines += [f"| {verdict.name} | {verdict.state} | {verdict.text} |" for verdict in verdicts]
    for output in outputs:
        lines += ["", f"## {output.title}", "", "```", f"$ {output.command}", output.text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _machine() -> list[str]:
    facts = {
        "commit": _commit(),
        "GPUs": ", ".join(gpu_names()) or "none",
        "links": gpu_links() or "none, or unknown",
        "driver": _first_line("/proc/driver/nvidia/version"),
        "processor": f"{processor_name()}, {len(os.sched_getaffinity(0))} cores",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES if _version(name)),
    }
    return ["| machine | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]


def _commit() -> str:
    folder = Path(__file__).parent
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown: git is missing"
    return result.stdout.strip() or "unknown: not a checkout"


def _first_line(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines()[0] if file.exists() else "none"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
