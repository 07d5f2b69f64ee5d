"""Compiles retrieval's Triton kernels for GPUs that are not there, and reports what came out: `python -m
tests.unit.topk_builds`.

A process of its own, because Triton decides at import whether it compiles or interprets. The kernels are built with the
very arguments that the launchers pass for tensors of the papers' shapes (on the meta device), and at a small shape with
each number as 1. Prints one JSON object per build.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.unit.triton_builds import ALL_CAPABILITIES, CAPABILITIES

TYPES = {torch.float32: "*fp32", torch.int64: "*i64"}


@dataclass(frozen=True)
class Shape:
    """One retrieval: its selection, keys per side, heads, rows kept and entries retrieved; the GPUs it can be built for;
    and its tokens.
    """

    selection: str
    keys: int
    heads: int
    row_top_k: int
    top_k: int
    of_capabilities: tuple[int, ...]
    num_tokens: int = 4096

    @property
    def capabilities(self) -> tuple[int, ...]:
        """Those of them that builds are asked for."""
        return tuple(capability for capability in self.of_capabilities if capability in CAPABILITIES)


# 2.5B/60B-top768, the longest lists (2.5B/120B-top256), sizes that are no powers of two (500M/6.8B), Memory+-1B/7B.
SHAPES = (
    Shape("tucker_topk", 3350, 1, 128, 768, ALL_CAPABILITIES),
    Shape("tucker_topk", 4781, 1, 128, 256, (90,)),
    Shape("tucker_topk", 964, 1, 94, 94, (90,)),
    Shape("product_topk", 1656, 2, 128, 256, ALL_CAPABILITIES),
    # A token that is generated, with one head. Triton makes a constant of an argument of 1.
    Shape("tucker_topk", 64, 1, 16, 32, (90,), num_tokens=1),
    Shape("product_topk", 64, 1, 16, 32, (90,), num_tokens=1),
)


class Launch(NamedTuple):
    """Arguments of a launch."""

    kernel: Any
    values: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion") if name in constants}
            names = self.kernel.arg_names
            values = dict(zip(names, arguments, strict=False)) | constants
            self.launches.append(Launch(self.kernel, values, options))

        return launch


def launches(shape: Shape) -> Iterator[Launch]:
    """Every kernel that a retrieval launches, with its arguments."""
    from kernels.list_topk import triton_op as lists
    from kernels.product_topk import triton_op as product
    from kernels.shuffled_rows import triton_op as shuffled
    from kernels.tucker_topk import triton_op as tucker

    recorded: list[Launch] = []
    for module in (lists, tucker, product, shuffled):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, Recorder(kernel.kernel if isinstance(kernel, Recorder) else kernel, recorded))
    scores = torch.empty(2, 2, shape.num_tokens, shape.heads, shape.keys, device="meta")
    rows, columns = scores.permute(0, 2, 3, 4, 1).unbind(0)
    if shape.selection == "tucker_topk":
        core = torch.empty(shape.heads, 2, 2, device="meta")
        tucker.tucker_topk._init_fn(rows, columns, core, core[:, 0], core[:, 1], shape.row_top_k, shape.top_k)
        entries = torch.empty(shape.num_tokens, shape.heads * shape.top_k, dtype=torch.int64, device="meta")
        window = (shape.keys**2, 0, shape.keys**2)
        shuffled._shuffled_rows._init_fn(entries, shape.keys, (2**62, 2**62 + 1, 5, 2**63 - 1), *window, True)
    else:
        product.product_topk._init_fn(rows[..., 0], columns[..., 0], shape.row_top_k, shape.top_k)
    yield from recorded


def with_ones(launch: Launch) -> Iterator[Launch]:
    """The launch with each of its numbers as 1, which the compiler is told as a constant."""
    for parameter in launch.kernel.params:
        value = launch.values[parameter.name]
        if not parameter.is_constexpr and isinstance(value, int) and value != 1:
            yield launch._replace(values={**launch.values, parameter.name: 1})


def build(launch: Launch, capability: int) -> Any:
    """The compiled kernel: integers and pointers specialised as Triton does at a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = TYPES[value.dtype] if isinstance(value, Tensor) else "i32" if value < 2**31 else "i64"
            if isinstance(value, Tensor) or value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def resources(compiled: Any, tool: Path) -> dict[str, int]:
    """Registers per thread, and bytes of stack (what spills) and of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": numbers["REG"],
        "spilled_bytes": numbers["STACK"] + numbers["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "threads": 32 * compiled.metadata.num_warps,
    }


def main() -> None:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for shape in SHAPES:
        for launch in launches(shape):
            for capability in shape.capabilities:
                found = resources(build(launch, capability), tool)
                report = {"kernel": launch.kernel.__name__, "capability": capability, "shape": asdict(shape), **found}
                json.dump(report, sys.stdout)
                print()
            for of_ones in with_ones(launch) if shape.num_tokens == 1 else ():
                build(of_ones, CAPABILITIES[0])


if __name__ == "__main__":
    main()
