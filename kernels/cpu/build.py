"""Compiles `rows.cpp` once per machine and loads it.

The library lies in a cache folder under a name that is a hash of the source, the flags, the compiler and the machine's instruction set, so
that machines which share a home do not load each other's. Nothing of PyTorch is compiled in, so its version does not enter. Processes
that start together take turns: the first compiles, the others find the library.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernels.implementations import KernelUnavailableError, compiler

_SOURCE = Path(__file__).with_name("rows.cpp")
# Without fused multiply-adds the bits are the same on every machine; the loops wait for memory anyway.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
# Linked without -fopenmp: the OpenMP calls find the library that torch has loaded, and share its threads instead of starting a second pool.
_LINK = ("-shared",)


def cache_folder() -> Path:
    """Where compiled kernels lie: `$MEGAMEM_CACHE_DIR`, or `megamem` in the user's cache folder."""
    if configured := os.environ.get("MEGAMEM_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megamem"


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        KernelUnavailableError: there is no compiler, it fails, or the result does not load.
    """
    path = compiler()
    if path is None:
        raise KernelUnavailableError(
            "the memory kernels in C++ need a compiler, and there is none: install g++, set CXX, or use torch"
        )
    return _load(build(cache_folder(), path))


def build(folder: Path, compiler_path: str) -> Path:
    """The library in `folder`, compiled if it is not there yet; any number of processes may ask at once.

    Raises:
        KernelUnavailableError: the compiler fails, or the folder cannot be written.
    """
    target = folder / f"rows-{_key(compiler_path)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "rows.lock", "w") as lock, tempfile.TemporaryDirectory(dir=folder) as scratch:
            # Released when this process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                built = Path(scratch) / "rows.so"
                _compile(compiler_path, built)
                os.replace(built, target)
    except OSError as error:
        raise KernelUnavailableError(
            f"cannot write the compiled memory kernels into {folder} ({error}): set MEGAMEM_CACHE_DIR to a folder of yours"
        ) from error
    return target


def _key(compiler_path: str) -> str:
    facts = (
        _SOURCE.read_text(encoding="utf-8"),
        *_COMPILE,
        *_LINK,
        compiler_path,
        platform.machine(),
        _instruction_set(),
    )
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _instruction_set() -> str:
    """What `-march=native` looks at."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


def _compile(compiler_path: str, target: Path) -> None:
    unlinked = target.with_suffix(".o")
    _run([compiler_path, *_COMPILE, str(_SOURCE), "-o", str(unlinked)])
    _run([compiler_path, *_LINK, str(unlinked), "-o", str(target)])


def _run(command: Sequence[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise KernelUnavailableError(
            f"the memory kernels in C++ do not compile here (set CXX to another compiler, or use the implementation torch): "
            f"{' '.join(command)}\n{finished.stderr[-2000:]}"
        )


def _load(path: Path) -> ctypes.CDLL:
    try:
        # Now and not lazily: an OpenMP call that nothing provides would otherwise end the process at its first use.
        loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError as error:
        raise KernelUnavailableError(
            f"{path} does not load ({error}): use the implementation torch, or remove the file to compile it again"
        ) from error
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    for name, num_pointers, num_numbers in (("sum_rows", 5, 6), ("dot_rows", 5, 6)):
        function = getattr(loaded, f"megamem_{name}")
        function.argtypes = [number, *[pointer] * num_pointers, *[number] * num_numbers]
    loaded.megamem_bucket_order.argtypes = [*[pointer] * 3, *[number] * 4]
    loaded.megamem_bucket_order.restype = None
    loaded.megamem_accumulate.argtypes = [number, *[pointer] * 7, *[number] * 7]
    return loaded
