"""Compiles the Triton kernels for GPUs that are not there, and reports what came out: `python -m
tests.unit.triton_builds`.

A process of its own, because Triton decides at import whether it compiles or interprets. Prints one JSON object per
build.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Most of what a build shows is the same for every generation of GPUs, and each costs a minute: `MEGAMEM_BUILD_FOR=all`
# builds for the others too.
ALL_CAPABILITIES = (80, 90, 100)
CAPABILITIES = ALL_CAPABILITIES if os.environ.get("MEGAMEM_BUILD_FOR") == "all" else (90,)
_LOADS = re.compile(r"\bLDG\.E(?:\.[A-Z0-9_]+)*")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*?);", re.MULTILINE)


def reports_of(module: str) -> list[dict[str, Any]]:
    """Reports that a module like this one prints, run with Triton's compiler."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module]
    finished = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def triton_minor() -> str:
    """Version of the installed Triton, as in 3.9."""
    return ".".join(version("triton").split(".")[:2])


@dataclass(frozen=True)
class Shape:
    """One call: a table of `width` columns of a type, with `groups` coefficient groups and `blocks` blocks."""

    dtype: str
    width: int
    groups: int = 1
    blocks: int = 1
    reads: int = 128


# Rows of the UltraMemV2 paper's models, with one and two cores; a shard of 24 columns; virtual blocks; wider than a
# tile.
NARROW = Shape("bf16", 24, groups=1, reads=256)
SHAPES = (
    Shape("bf16", 192, groups=2, reads=32),
    Shape("bf16", 288, groups=1, reads=768),
    NARROW,
    Shape("fp32", 192, groups=1, blocks=4, reads=32),
    Shape("bf16", 2048, groups=1, reads=128),
)


@dataclass(frozen=True)
class Build:
    """Figures of one kernel that the compiler built."""

    kernel: str
    capability: int
    shape: Shape
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    load_bits: dict[int, int]
    """Number of global loads in the machine code by their width in bits."""
    loop: list[str]
    """Names of the longest loop's instructions, with their modifiers, in their order."""


# Shares of the largest model's rows where 16 ranks split them.
SHARES = tuple(Shape("bf16", width, reads=256) for width in (60, 20))


def sources(shape: Shape) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Each kernel with the types of its arguments, its constants and its warps, as their `triton_op.py` launch it."""
    import triton.language as tl

    from kernels.common.tiles import gather_tile
    from kernels.gather_dot.triton_op import gather_dot_kernel
    from kernels.gather_sum.triton_op import gather_sum_kernel

    row = f"*{shape.dtype}"
    common = {"C": shape.groups, "W": shape.width, "B": shape.blocks, "SUM": tl.float32}
    for tokens in (1, 4096):
        tile = gather_tile(shape.width // shape.groups, shape.reads, tokens * shape.groups)
        constants = {**common, "ENTRIES": tile.entries, "COLUMNS": tile.columns}
        pointers = {"table": row, "ids": "*i32", "coef": row, "bins": "*i32", "out": row, "J": "i32"}
        yield gather_sum_kernel, pointers, constants, tile.num_warps
        pointers = {"table": row, "ids": "*i32", "x": row, "bins": "*i32", "out": row, "J": "i32"}
        yield gather_dot_kernel, pointers, constants, tile.num_warps
    yield from accumulations(shape)


def accumulations(shape: Shape) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """As `sources`: the kernels of segment_accumulate."""
    import triton.language as tl

    from kernels.common.tiles import ACCUMULATE_AHEAD, accumulate_tile
    from kernels.segment_accumulate import triton_op

    row = f"*{shape.dtype}"
    tile = accumulate_tile(shape.width // shape.groups)
    constants = {"BLOCK": triton_op.BLOCK, "W": shape.width, "COLUMNS": tile.columns, "SUM": tl.float32}
    entries = {"J": shape.reads, "C": shape.groups, "B": shape.blocks, "RUNS": tile.entries, "AHEAD": ACCUMULATE_AHEAD}
    pointers = {"accumulator": "*fp32", "sorted_rows": "*i32", "order": "*i64", "cuts": "*i32", "partials": "*fp32"}
    pointers |= {"coef": row, "vec": row, "bins": "*i32", "num_slots": "i32", "slots_per_run": "i32"}
    yield triton_op.segment_accumulate_kernel, pointers, {**constants, **entries}, tile.num_warps
    tile = accumulate_tile(shape.width)
    constants |= {"ITEMS": tile.entries, "COLUMNS": tile.columns}
    pointers = {"accumulator": "*fp32", "sorted_rows": "*i32", "numbers": "*i32", "partials": "*fp32"}
    pointers |= {"longer_partials": "*fp32"} | dict.fromkeys(("num_slots", "num_items", "stride", "before"), "i32")
    yield triton_op.add_block_sums_kernel, pointers, constants, tile.num_warps


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, capability: int) -> Any:
    """The compiled kernel, for pointers aligned to 16 bytes, as PyTorch allocates them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})


def inspect(compiled: Any, kernel: str, capability: int, shape: Shape, tool: Path) -> Build:
    """Resources and loads, read off the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    load_bits: dict[int, int] = {}
    for load in _LOADS.findall(code):
        width = next((int(part) for part in load.split(".") if part.isdigit()), None)
        bits = width or (16 if ".U16" in load else 8 if ".U8" in load else 32)
        load_bits[bits] = load_bits.get(bits, 0) + 1
    return Build(
        kernel,
        capability,
        shape,
        numbers["REG"],
        numbers["STACK"],
        numbers["LOCAL"],
        compiled.metadata.shared,
        load_bits,
        _longest_loop(code),
    )


def _longest_loop(code: str) -> list[str]:
    """Names of the instructions between a branch back and its target, where these are the most."""
    instructions = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(code)]
    longest: list[str] = []
    for at, name, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        # The branch at the very end goes to itself.
        if target is not None and int(target[1], 16) < at:
            body = [other for address, other, _ in instructions if int(target[1], 16) <= address <= at]
            longest = max(longest, body, key=len)
    return longest


def main() -> None:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    every = [(shape, source) for shape in SHAPES for source in sources(shape)]
    every += [(shape, source) for shape in SHARES for source in accumulations(shape)]
    for shape, (kernel, types, constants, num_warps) in every:
        for capability in CAPABILITIES:
            compiled = build(kernel, types, constants, num_warps, capability)
            print(json.dumps(asdict(inspect(compiled, kernel.__name__, capability, shape, tool))), flush=True)
    for kernel, types, constants, num_warps in sources(NARROW):
        for name in (name for name, kind in types.items() if not kind.startswith("*")):
            # As Triton specialises it at a launch: a constant, with no type.
            others = {other: kind for other, kind in types.items() if other != name}
            build(kernel, others, {**constants, name: 1}, num_warps, CAPABILITIES[0])


if __name__ == "__main__":
    main()
