"""Limits that a build must keep, whatever the GPU: each finding names the kernel, the figure and the limit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
import triton

from kernels.common.tiles import accumulate_instructions
from tests.unit.kernels.machine_code.builds import Build, Launch, build
from tests.unit.kernels.machine_code.offsets import places_of_lines, wrapped_offsets

MAX_SHARED_BYTES = 48 * 1024
"""Shared memory of a program without opting in to more, on every one of these GPUs."""
REGISTERS = 65_536
"""Registers of an SM."""
WAITING_WARPS = 20
"""Warps per SM that shall fit of a kernel that reads rows of tables: they wait for rows by turns."""
_ALONE_WAITING_WARPS = 12
"""Such warps that have a token each: all rows of it are under way at once (0.072 ms, 2.8 TB/s on an H100)."""
_SPILLED_BY = {
    ("collect_grid_kernel", "3.6"): 360,
    ("collect_grid_kernel", "3.8"): 72,
    ("collect_lists_kernel", "3.6"): 232,
    ("collect_sums_kernel", "3.6"): 360,
    ("tucker_entry_gradients_kernel", "3.7"): 8,
    ("normal_product_kernel", "3.9"): 16,
}
"""Bytes that a thread of a kernel spills, by minor versions of Triton that do worse."""
_SHARED_BY = {
    ("collect_grid_kernel", "3.6"): 64 * 1024,
    ("collect_lists_kernel", "3.6"): 128 * 1024,
    ("collect_sums_kernel", "3.6"): 64 * 1024,
    ("normal_product_gradients_kernel", "3.8"): 72 * 1024,
}
"""Shared memory of a kernel, by versions that opt in to more."""
_SHARED_ON = {("normal_product_gradients_kernel", 100): 72 * 1024}
"""Shared memory of a kernel, by capabilities whose tensor cores read more from there: three programs have room side by side."""
_LOAD_BYTES = 16
_EXCHANGES = {"BAR", "SHFL", "LDS", "STS", "REDUX", "VOTE"}
"""Instructions by which threads pass something on, or wait for each other."""
_LOADS_PER_ENTRY = 5
"""Row, place, coefficient, vector and held row."""
_OF_PLANS = 0.25
"""Share by which a loop's instructions may differ from those that plans count; capability 100 needs a fifth fewer."""
_PRODUCT = re.compile(r"tt\.dot %[\w.]+, %[\w.]+, %(?P<sum>[\w.]+)\b")
_TILE_OF_ROWS = re.compile(r"tt\.load .*: tensor<(\d+)x(\d+)x!tt\.ptr<\w+>>")


def findings(built: Build) -> list[str]:
    """Every limit that a build breaks, in words; none if it keeps them all."""
    what = f"{described(built.launch)} for {built.capability}"
    return [f"{what}: {finding}" for finding in _findings(built)]


def described(launch: Launch) -> str:
    """A launch in words, as in gather_sum_kernel(J=256; W=60, ...)."""
    constant = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    numbers = {name: value for name, value in launch.values.items() if isinstance(value, (int, bool))}
    groups = [
        ", ".join(f"{name}={value}" for name, value in numbers.items() if (name in constant) == is_constant)
        for is_constant in (False, True)
    ]
    return f"{launch.name}({'; '.join(filter(None, groups))})"


def _findings(built: Build) -> Iterator[str]:
    launch, minor = built.launch, ".".join(triton.__version__.split(".")[:2])
    if built.spilled_bytes > (allowed := _SPILLED_BY.get((launch.name, minor), 0)):
        yield f"a thread spills {built.spilled_bytes} bytes, of {allowed} that may be"
    more = _SHARED_ON.get((launch.name, built.capability), MAX_SHARED_BYTES)
    if built.shared_bytes > (allowed := _SHARED_BY.get((launch.name, minor), more)):
        yield f"a program takes {built.shared_bytes:,} bytes of shared memory, of {allowed:,}"
    waiting = _ALONE_WAITING_WARPS if launch.name == "gather_sum_kernel" and launch.num_warps == 1 else WAITING_WARPS
    allowed = REGISTERS // (32 * max(launch.num_warps, waiting if "W" in launch.values else 0))
    if built.registers > allowed:
        yield f"a thread takes {built.registers} registers, of {allowed}"
    yield from _narrow_loads(built)
    yield from _cut_off_sums(built)
    if launch.name == "segment_accumulate_kernel":
        yield from _waits_of_entries(built)
    numbers = {name: value for name, value in launch.values.items() if isinstance(value, int)}
    for place in wrapped_offsets(built.intermediate, numbers, launch.grid):
        yield f"the offset at {place}"


def _narrow_loads(built: Build) -> Iterator[str]:
    """Tiles of rows that are loaded in narrower pieces than their alignment, and a thread's part of the tile, allow."""
    values = built.launch.values
    if "W" not in values:
        return
    width = values["W"] // values.get("C", 1)
    for place, (rows, columns) in places_of_lines(built.intermediate, _TILE_OF_ROWS).items():
        if int(columns) == 1:
            continue
        loads = [each for each in built.code.instructions if each.load_bytes and place in each.source]
        if not loads:
            yield f"{_short(place)} loads rows, but no instruction comes from there"
            continue
        element = _element_bytes(built, place)
        own = max(1, int(rows) * int(columns) // (32 * built.launch.num_warps))
        allowed = element * min(_LOAD_BYTES // element, math.gcd(width, _LOAD_BYTES // element), int(columns), own)
        narrowest = min(each.load_bytes for each in loads)
        if narrowest < allowed:
            yield f"{_short(place)} loads rows {narrowest} bytes at a time, of {allowed}"


def _cut_off_sums(built: Build) -> Iterator[str]:
    """Products that are added to what a loop carries by tensor cores, which cut off each time what fp32 would round: over 16,384
    columns to 1e-4 of the largest sum (`kernels/normal_product/README.md`)."""
    code = built.intermediate
    for product in _PRODUCT.finditer(code):
        if not re.search(rf"%{re.escape(product['sum'])} = (tt\.dot|arith\.constant) ", code):
            yield "tensor cores add products to the sum of its loop"


def _waits_of_entries(built: Build) -> Iterator[str]:
    """Reasons for which entries of `segment_accumulate` wait for each other, or take longer than plans say."""
    values, loop = built.launch.values, built.code.loops[0]
    body = [each for number in sorted(loop.blocks) for each in built.code.blocks[number].instructions]
    ops = [each.op for each in body]
    if exchanges := _EXCHANGES.intersection(ops):
        yield f"threads wait for each other in its loop: {', '.join(sorted(exchanges))}"
    stored = ops.index("STG") if "STG" in ops else len(ops)
    if "LDG" in ops[stored:]:
        yield "its loop stores a row before all of its loads are under way"
    loads, wanted = ops.count("LDG"), _LOADS_PER_ENTRY * values["AHEAD"]
    # Rounded rows and scratch are stored apart.
    stores = values["AHEAD"] * (1 + values["ROUND"])
    if loads < wanted or ops.count("STG") != stores:
        yield f"its loop has {loads} loads, of {wanted}, and {ops.count('STG')} stores, of {stores}"
    width = values["W"] // values["C"]
    column_tiles = -(-width // values["COLUMNS"])
    took = len(ops) * built.launch.num_warps * column_tiles / (values["AHEAD"] * values["RUNS"])
    planned = accumulate_instructions(width, rounded=values["ROUND"])
    if abs(took - planned) > _OF_PLANS * planned:
        yield f"an entry takes {took:.1f} instructions of warps, and plans count {planned:.1f}"


def _element_bytes(built: Build, place: tuple[str, int]) -> int:
    kinds = places_of_lines(built.intermediate, re.compile(r"tt\.load .*!tt\.ptr<([a-z]+)(\d+)>>"))
    return int(kinds[place][1]) // 8


def _short(place: tuple[str, int]) -> str:
    return f"{'/'.join(place[0].split('/')[-3:])}:{place[1]}"


def problems(launch: Launch, capability: int) -> list[str]:
    """Findings of a launch's build, or that there is none."""
    try:
        built = build(launch, capability)
    except triton.CompilationError as error:
        return [f"{described(launch)} does not compile for {capability}: {_cause(error)}"]
    return findings(built)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[-1]


def specialised(launch: Launch) -> Iterator[Launch]:
    """The launch with each number as 1, as a multiple of 16, and as neither, which the compiler tells apart."""
    for name, value in launch.numbers.items():
        others = (1, value // 16 * 16 + 16, value | 1 if value > 1 else 3)
        yield from (launch.with_value(name, other) for other in others if _kind(other) != _kind(value))


def _kind(value: int) -> str:
    return "1" if value == 1 else "multiple" if value % 16 == 0 else "other"


def of_ones(launch: Launch) -> Launch:
    """The launch with all of its numbers as 1."""
    for name in launch.numbers:
        launch = launch.with_value(name, 1)
    return launch


def compiles_alike(launch: Launch) -> tuple[object, ...]:
    """Equal for launches that the compiler builds the same code of."""
    values = launch.values
    kinds = []
    for parameter in launch.kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr:
            kinds.append(str(value))
        elif isinstance(value, torch.Tensor):
            kinds.append(str(value.dtype))
        else:
            kinds.append("any" if parameter.do_not_specialize else _kind(value))
            kinds.append("i64" if value >= 2**31 else "i32")
    return launch.name, tuple(kinds), tuple(sorted(launch.options.items()))
