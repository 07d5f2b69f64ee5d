"""The names that `train.kernels` takes, what `auto` means, and what a machine can run.

`auto` is Triton for tables on a GPU with Triton installed, C++ for tables on the CPU where there is a compiler, and
PyTorch's own operations otherwise. With cpu, whether chosen or by auto, an op without C++ is PyTorch's. Nothing else is ever chosen in place of what was asked for: what cannot run is an error.

Imports no torch: configurations are checked without it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import Literal

Implementation = Literal["auto", "triton", "cpu", "torch", "naive"]
"""triton; cpu: C++; torch: its operations, without large temporaries; naive: the oracles, by autograd; auto: above."""


class KernelUnavailableError(ValueError):
    """An implementation was asked for that cannot run here; the message says why and what to do."""


def automatic(device_type: str) -> Implementation:
    """Implementation that `auto` selects for tables on this type of device."""
    fast: Implementation = "triton" if device_type == "cuda" else "cpu"
    return "torch" if unavailable(fast, device_type) else fast


def unavailable(implementation: Implementation, device_type: str) -> str | None:
    """Reason why an implementation cannot run on tables on this type of device, and the fix; None if it can."""
    if implementation == "triton":
        if importlib.util.find_spec("triton") is None:
            return 'needs Triton, which is not installed: pip install "megamem[gpu]", or use auto or torch'
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return (
                "needs an NVIDIA GPU, and the tables are on the CPU: use auto, cpu or torch "
                "(TRITON_INTERPRET=1 is for tests)"
            )
        if device_type != "cuda" and _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
            return (
                "is interpreted here, and the interpreter of Triton 3.6 needs numpy before 2.4: "
                "install triton>=3.7 or numpy<2.4"
            )
    if implementation == "cpu":
        if device_type != "cpu":
            return "is for tables on the CPU, and they are on a GPU: use auto or triton"
        if compiler() is None:
            return "needs a C++ compiler, and there is none: install g++, set CXX, or use auto or torch"
    return None


def _version(package: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in version(package).split(".")[:2])


def compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, or the first of c++, g++ and clang++ there is; None without one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def describe(chosen: Mapping[str, Implementation]) -> str:
    """The chosen implementations, most ops' first: `cpu`, or `cpu, gather_dot naive, softmax_sums torch`."""
    ((usual, _),) = Counter(chosen.values()).most_common(1)
    return ", ".join([usual, *(f"{op} {name}" for op, name in chosen.items() if name != usual)])
