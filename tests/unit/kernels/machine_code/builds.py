"""Launches of the Triton kernels as their launchers make them, and builds of each."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.common.ops import body_of
from tests.unit.kernels.machine_code.sass import Code

CAPABILITIES = (80, 90, 100)
"""Compute capabilities, times ten, that the kernels are for: A100, H100 and H200, B200."""
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_WARP = 32


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: the function that Triton compiles.
        values: its arguments by name, constants included.
        grid: programs along each axis.
        options: options of the compiler, as in num_warps.
    """

    kernel: Any
    values: Mapping[str, Any]
    grid: tuple[int, int, int]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        name: str = self.kernel.__name__
        return name

    @property
    def num_warps(self) -> int:
        warps: int = self.options.get("num_warps", 4)
        return warps

    @property
    def num_programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def numbers(self) -> dict[str, int]:
        """Integers that the compiler may specialise."""
        return {
            parameter.name: self.values[parameter.name]
            for parameter in self.kernel.params
            if not parameter.is_constexpr
            and not parameter.do_not_specialize
            and isinstance(self.values[parameter.name], int)
        }

    def with_value(self, name: str, value: int) -> Launch:
        return replace(self, values={**self.values, name: value})


def recorded(call: Callable[[], object]) -> list[Launch]:
    """The launches of a call of the ops' launchers, which launch nothing; tensors may be on the meta device."""
    _refuse_interpreter()
    found: list[Launch] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, arguments, strict=False)) | {name: named[name] for name in names if name in named}
        options = {name: value for name, value in named.items() if name not in names}
        found.append(Launch(kernel, values, (*grid, 1, 1)[:3], options))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return found


def launcher(op: Any) -> Any:
    """The function behind a custom op, which launches its kernels whatever device its tensors are on."""
    return body_of(op)


def _refuse_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET"):
        raise RuntimeError(
            "TRITON_INTERPRET is set, and so Triton compiles nothing: unset it to look at what the compiler builds"
        )


def source_of(launch: Launch) -> Any:
    """The kernel with its arguments specialised as Triton does at a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.values[parameter.name]
        is_free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_free and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        # PyTorch's tensors are aligned.
        if isinstance(value, Tensor) or (is_free and isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)


def compiled(launch: Launch, capability: int) -> Any:
    """Compile for a GPU that need not be there, or take what Triton's cache has of it."""
    _refuse_interpreter()
    return triton.compile(source_of(launch), target=GPUTarget("cuda", capability, _WARP), options=dict(launch.options))


@dataclass(frozen=True)
class Build:
    """One kernel as the compiler built it.

    Attributes:
        launch: a launch of the kernel.
        capability: compute capability that it is for.
        registers: registers of a thread.
        spilled_bytes: bytes of a thread's memory, which registers did not hold.
        shared_bytes: bytes of shared memory of a program.
        intermediate: Triton's own code of it (TTIR), by which offsets are judged.
        binary: its machine code, as an ELF file.
    """

    launch: Launch
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    intermediate: str
    binary: bytes

    @cached_property
    def code(self) -> Code:
        """Its instructions, which take a third of a second to list: only who looks at them waits for that."""
        # Branches by a stack, which the analysis of data flow would annotate, are those of older GPUs.
        listing = _ask(
            "nvdisasm",
            self.binary,
            "--print-line-info",
            "--print-instruction-encoding",
            "--print-code",
            "--no-dataflow",
        )
        return Code(listing, kernel=self.launch.name)


def build(launch: Launch, capability: int) -> Build:
    """Compile, and read what the kernel takes."""
    made = compiled(launch, capability)
    usage = _ask("cuobjdump", made.asm["cubin"], "--dump-resource-usage")
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Build(
        launch,
        capability,
        registers=numbers["REG"],
        spilled_bytes=numbers["STACK"] + numbers["LOCAL"],
        shared_bytes=made.metadata.shared,
        intermediate=made.asm["ttir"],
        binary=made.asm["cubin"],
    )


def _ask(tool: str, binary: bytes, *options: str) -> str:
    path = _tool(tool)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        finished = subprocess.run([path, *options, file.name], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{tool} cannot read what Triton {triton.__version__} built: {finished.stderr.strip()}")
    return finished.stdout


def _tool(name: str) -> Path:
    """A tool of the wheel, as Triton finds them: `TRITON_CUOBJDUMP_PATH` names another.

    Raises:
        RuntimeError: the tool is not there.
    """
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    variable = f"TRITON_{name.upper()}_PATH"
    path = Path(os.environ.get(variable, own))
    if not os.access(path, os.X_OK):
        raise RuntimeError(
            f"{path} is not there, which reads machine code: Triton's wheels from 3.6 on bring {name} along (pip install "
            f"--force-reinstall triton=={triton.__version__}), and so does NVIDIA's CUDA toolkit (set {variable})"
        )
    return path
