"""The ops' kernels in C++: compiles an op's `cpu.cpp` once per machine, loads it, and calls its functions with tensors.

A library's name in the cache folder is a hash of the source, the flags, the compiler and the machine's instruction set,
so machines that share a home do not load each other's. Nothing of PyTorch is compiled in, so its version does not
enter. Processes that start together take turns: the first compiles, the others find the library.
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
from pathlib import Path

import torch
from torch import Tensor

from kernels.common.tables import check_contiguous, row_dtype
from kernels.implementations import KernelUnavailableError, compiler
from kernels.processor import instruction_set

_OPS = Path(__file__).parents[1]
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
# Row and operand types that are compiled; the numbers are those of `dispatch` in rows.h.
_TYPES = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.float32, torch.bfloat16): 2,
    (torch.bfloat16, torch.float32): 3,
    (torch.float64, torch.float64): 4,
}
# Types of scores, by the number that a selection gets.
_SCORES = {torch.float32: 0, torch.float64: 1}
_MAX_ENTRIES = 2**31
# Without fused multiply-adds the bits are the same on every machine; the loops wait for memory anyway.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
# Linked without -fopenmp: the OpenMP calls find the library that torch has loaded, and share its threads.
_LINK = ("-shared",)


def cache_folder() -> Path:
    """Folder of the compiled kernels: `$MEGAMEM_CACHE_DIR`, or `megamem` in the user's cache folder."""
    if configured := os.environ.get("MEGAMEM_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megamem"


def source(op: str) -> Path:
    """The C++ of an op, which may not exist: then PyTorch's operations are fast enough."""
    return _OPS / op / "cpu.cpp"


@functools.cache
def library(op: str) -> ctypes.CDLL:
    """The compiled kernels of an op.

    Raises:
        KernelUnavailableError: the compiler is missing or fails, or the result does not load.
    """
    path = compiler()
    if path is None:
        raise KernelUnavailableError(
            "the memory kernels in C++ need a compiler, and there is none: install g++, set CXX, or use torch"
        )
    built = build(op, cache_folder(), path)
    try:
        # Now and not lazily: an OpenMP call that nothing provides would otherwise end the process at its first use.
        return ctypes.CDLL(str(built), mode=os.RTLD_NOW)
    except OSError as error:
        raise KernelUnavailableError(
            f"{built} does not load ({error}): use the implementation torch, or remove the file to compile it again"
        ) from error


def call(op: str, function: str, *arguments: Tensor | int | None) -> None:
    """Runs `megamem_<function>` of an op's `cpu.cpp`.

    A tensor is passed as the address of its first element, None as a null pointer, a number in 64 bits; after all of
    them comes the number of threads.
    """
    converted = (
        ctypes.c_int64(argument)
        if isinstance(argument, int)
        else ctypes.c_void_p(None if argument is None else argument.data_ptr())
        for argument in (*arguments, torch.get_num_threads())
    )
    getattr(library(op), f"megamem_{function}")(*converted)


def types_of(rows: Tensor, operand: Tensor) -> tuple[int, Tensor]:
    """The number of the two types, and the operand, contiguous; where the types have no number, as the rows' type."""
    if (rows.dtype, operand.dtype) not in _TYPES:
        operand = operand.to(rows.dtype)
    if (rows.dtype, operand.dtype) not in _TYPES:
        raise ValueError(
            f"the memory kernels in C++ know fp32, bf16 and fp64 tables, and this one is {rows.dtype}: use torch"
        )
    return _TYPES[rows.dtype, operand.dtype], operand.contiguous()


def ids_in(rows: Tensor, ids: Tensor) -> Tensor:
    """Ids of a table's rows as the C++ takes them: contiguous, in 32 bits.

    Raises:
        ValueError: the table is on a device, has strides or too many rows, or too many are read.
    """
    if rows.device.type != "cpu":
        raise ValueError(
            f"the memory kernels in C++ take tensors on the CPU, and the table is on {rows.device}: use triton or torch"
        )
    check_contiguous(rows)
    if ids.numel() >= _MAX_ENTRIES:
        raise ValueError(
            f"{ids.numel()} rows are read at once, and the memory kernels in C++ count to 2^31: use smaller "
            "microbatches"
        )
    if row_dtype(rows.shape[0]) != torch.int32:
        raise ValueError(f"the table has {rows.shape[0]} rows, and the memory kernels in C++ count to 2^31: use torch")
    return in_32_bits(ids)


def in_32_bits(numbers: Tensor) -> Tensor:
    """Ids or bins, which fit, as the C++ takes them."""
    return numbers.to(torch.int32).contiguous()


def lists(*scores: Tensor) -> tuple[Tensor, ...]:
    """Scores whose last dimension, the list that is selected from, is contiguous; the others keep their strides.

    Raises:
        ValueError: scores that the selections in C++ do not know.
    """
    for each in scores:
        if each.device.type != "cpu" or each.dtype not in _SCORES or each.dtype != scores[0].dtype:
            raise ValueError(
                f"the selections in C++ take scores on the CPU that are all fp32 or all fp64, and these are {each.dtype} "
                f"on {each.device}: use triton or torch"
            )
    return tuple(each if each.stride(-1) == 1 else each.contiguous() for each in scores)


def type_of_scores(scores: Tensor) -> int:
    """The number of their type."""
    return _SCORES[scores.dtype]


def build(op: str, folder: Path, compiler_path: str) -> Path:
    """An op's library in `folder`, compiled if it is not there yet; any number of processes may ask at once.

    Raises:
        KernelUnavailableError: the compiler fails, or the folder cannot be written.
    """
    target = folder / f"{op}-{_key(op, compiler_path)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            open(folder / f"{op}.lock", "w", encoding="utf-8") as lock,
            tempfile.TemporaryDirectory(dir=folder) as scratch,
        ):
            # Released when this process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                built = Path(scratch) / "library.so"
                _compile(compiler_path, source(op), built)
                os.replace(built, target)
    except OSError as error:
        raise KernelUnavailableError(
            f"cannot write the compiled memory kernels into {folder} ({error}): set MEGAMEM_CACHE_DIR to a folder of "
            "yours"
        ) from error
    return target


def _key(op: str, compiler_path: str) -> str:
    sources = (path.read_text(encoding="utf-8") for path in (source(op), *_HEADERS))
    facts = (*sources, *_COMPILE, *_LINK, compiler_path, platform.machine(), instruction_set())
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _compile(compiler_path: str, path: Path, target: Path) -> None:
    unlinked = str(target.with_suffix(".o"))
    for command in ([*_COMPILE, str(path), "-o", unlinked], [*_LINK, unlinked, "-o", str(target)]):
        finished = subprocess.run([compiler_path, *command], capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise KernelUnavailableError(
                "the memory kernels in C++ do not compile here (set CXX to another compiler, or use the implementation "
                f"torch): {' '.join((compiler_path, *command))}\n{finished.stderr[-2000:]}"
            )
