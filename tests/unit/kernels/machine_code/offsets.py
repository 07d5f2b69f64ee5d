"""Offsets of pointers that Triton computes in 32 bits: found where they can pass 2^31.

Values of Triton's code (TTIR) get the interval that they can be in, from the arguments and the grid of a launch. What is
loaded, and what a loop carries, may be anything. A product in 32 bits whose interval is wider wraps around, and so does
a sum of numbers that follow from arguments and grid; it is reported if a pointer is moved by it. Sums of loaded numbers
are trusted to mean what they say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

Interval = tuple[int, int]

_DEFINITION = re.compile(r'^\s*%(?P<name>[\w$.-]+)(?::\d+)? = "?(?P<op>[\w.]+)"?(?P<rest>.*)$')
_OPERAND = re.compile(r"%([\w$.-]+)")
_ARGUMENT = re.compile(r"%([\w$.-]+): ((?:tensor<[^>]*>|!tt\.ptr<[^>]*>|\w+))")
_INTEGER = re.compile(r"(?:x|^)(i\d+)>?$")
_LOCATION = re.compile(r"loc\((#loc\d*)\)\s*$")
_DEFINED_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_FILE = re.compile(r'"([^"]+)":(\d+):\d+')
_AXES = {"x": 0, "y": 1, "z": 2}


@dataclass(frozen=True)
class _Value:
    """Knowledge of a value.

    Attributes:
        interval: interval that it is in.
        bits: bits of its type; 0: no integer.
        is_known: the value follows from arguments and grid alone.
        wrapped: places where it, or what it is made of, may have wrapped around.
    """

    interval: Interval
    bits: int
    is_known: bool = False
    wrapped: tuple[str, ...] = ()


def wrapped_offsets(code: str, arguments: Mapping[str, int], grid: Sequence[int]) -> list[str]:
    """Places at which a pointer's offset can wrap around, with the largest value that it should have.

    Args:
        code: TTIR of one kernel.
        arguments: its integers by name.
        grid: programs along each axis.
    """
    return _Reader(code, arguments, grid).found()


def places_of_lines(code: str, pattern: re.Pattern[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """File and line of the source for every line of TTIR in which a pattern is found, with the pattern's groups."""
    locations = _Locations(code.splitlines())
    found = {}
    for line in code.splitlines():
        if (match := pattern.search(line)) and (place := locations.of(line)):
            found[place] = match.groups()
    return found


class _Locations:
    """Lines of the source that lines of TTIR come from."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._defined = {found[1]: found[2] for line in lines if (found := _DEFINED_LOCATION.match(line))}

    def of(self, line: str) -> tuple[str, int] | None:
        """File and line; a call that was inlined counts where it was written."""
        marked = _LOCATION.search(line)
        text = "" if marked is None else self._defined.get(marked[1], "")
        # A place may have a name, or a caller.
        for _ in range(8):
            if named := _FILE.search(text):
                return named[1], int(named[2])
            inner = re.search(r"#loc\d*", text)
            text = "" if inner is None else self._defined.get(inner[0], "")
        return None


class _Reader:
    def __init__(self, code: str, arguments: Mapping[str, int], grid: Sequence[int]) -> None:
        self._lines = code.splitlines()
        self._arguments, self._grid = arguments, grid
        self._values: dict[str, _Value] = {}
        self._locations = _Locations(self._lines)

    def found(self) -> list[str]:
        places: list[str] = []
        combining: str | None = None
        for line in self._lines:
            text = line.partition(" loc(")[0].rstrip()
            if text.lstrip().startswith("tt.func"):
                for name, kind in _ARGUMENT.findall(text):
                    known = self._arguments.get(name)
                    self._values[name] = (
                        self._of_type(kind) if known is None else _Value((known, known), _bits(kind), True)
                    )
                continue
            if combining is not None and text.lstrip().startswith("})"):
                # The end of a reduction: its type tells how many were combined.
                self._values[combining] = replace(self._values[combining], bits=_bits(_result_type(text)))
                combining = None
                continue
            definition = _DEFINITION.match(text)
            if definition is None:
                for name, kind in _ARGUMENT.findall(text):
                    # Arguments of blocks: what a loop carries.
                    self._values.setdefault(name, self._of_type(kind))
                continue
            name, op, rest = definition["name"], definition["op"], definition["rest"]
            operands = [self._values.get(each, _Value((0, 0), 0)) for each in _OPERAND.findall(rest)]
            if op in ("tt.reduce", "tt.scan"):
                combining = name
                self._values[name] = operands[0]
                continue
            if combining is not None and op in ("arith.addi", "arith.muli"):
                # Sums of at most all entries of a program's tile.
                low, high = self._values[combining].interval
                self._values[combining] = replace(self._values[combining], interval=(low * _MAX_TILE, high * _MAX_TILE))
                continue
            if op == "tt.addptr" and len(operands) == 2:
                places += operands[1].wrapped
            self._values[name] = self._result(op, rest, operands, line)
            if op == "scf.for":
                self._loop(rest)
        return list(dict.fromkeys(places))

    def _loop(self, rest: str) -> None:
        """The counter of `scf.for %i = %low to %high step %step`."""
        names = _OPERAND.findall(rest)
        if len(names) >= 3:
            low, high = (self._values.get(each, _Value((0, 0), 32)) for each in names[1:3])
            interval = low.interval[0], max(low.interval[0], high.interval[1] - 1)
            self._values[names[0]] = _Value(interval, high.bits, low.is_known and high.is_known)

    def _of_type(self, kind: str) -> _Value:
        bits = _bits(kind)
        return _Value(_range(bits), bits)

    def _result(self, op: str, rest: str, operands: Sequence[_Value], line: str) -> _Value:
        if op == "tt.load":
            loaded = re.search(r"!tt\.ptr<i(\d+)>", rest)
            bits = 0 if loaded is None else int(loaded[1])
            return _Value(_range(bits), bits)
        bits = _bits(_result_type(rest))
        if bits == 0:
            return _Value(_range(bits), bits)
        if op == "arith.cmpi":
            return _Value((0, 1), 1, True)
        interval = _exact(op, rest, [each.interval for each in operands], self._grid)
        wrapped = tuple(dict.fromkeys(place for each in operands for place in each.wrapped))
        if interval is None:
            return _Value(_range(bits), bits, wrapped=wrapped)
        is_known = all(each.is_known for each in operands)
        low, high = _range(bits)
        if low <= interval[0] and interval[1] <= high:
            return _Value(interval, bits, is_known, wrapped)
        is_product = op in ("arith.muli", "arith.shli")
        if bits == 32 and (is_product or (is_known and op in ("arith.addi", "arith.subi"))):
            largest = interval[1] if interval[1] > high else interval[0]
            wrapped = (*wrapped, f"{self._place(line)} can reach {largest:,}, in 32 bits")
        return _Value((max(low, min(interval[0], high)), min(high, max(interval[1], low))), bits, is_known, wrapped)

    def _place(self, line: str) -> str:
        """File and line, as in kernels/gather_sum/triton_op.py:57."""
        place = self._locations.of(line)
        return "an unknown line" if place is None else f"{'/'.join(place[0].split('/')[-3:])}:{place[1]}"


# Entries of the largest tile that a program holds.
_MAX_TILE = 1 << 14


def _exact(op: str, rest: str, operands: Sequence[Interval], grid: Sequence[int]) -> Interval | None:
    """The interval of a result, were there no end of bits; None: nothing is known."""
    if op == "arith.constant":
        number = re.search(r"(?:dense<)?(-?\d+)>? ?:", rest)
        return (int(number[1]), int(number[1])) if number else (0, 1) if "true" in rest or "false" in rest else None
    if op == "tt.make_range":
        start, end = (int(re.search(rf"{key} = (-?\d+)", rest)[1]) for key in ("start", "end"))  # type: ignore[index]
        return start, end - 1
    if op in ("tt.get_program_id", "tt.get_num_programs"):
        programs = grid[_AXES[rest.split()[0]]]
        return (0, programs - 1) if op == "tt.get_program_id" else (programs, programs)
    if op in _SAME:
        return operands[0] if operands else None
    if op == "arith.select" and len(operands) == 3:
        return min(operands[1][0], operands[2][0]), max(operands[1][1], operands[2][1])
    if len(operands) != 2:
        return None
    return _of_two(op, *operands)


_SAME = frozenset(
    (
        *("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans"),
        *("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast"),
    )
)


def _of_two(op: str, a: Interval, b: Interval) -> Interval | None:
    if op == "arith.addi":
        return a[0] + b[0], a[1] + b[1]
    if op == "arith.subi":
        return a[0] - b[1], a[1] - b[0]
    if op == "arith.muli":
        corners = [x * y for x in a for y in b]
        return min(corners), max(corners)
    if op == "arith.shli" and b[0] >= 0 and b[1] < 64:
        return min(a[0] << b[1], a[0]), max(a[1] << b[1], a[1])
    if op in ("arith.minsi", "arith.maxsi"):
        pick = min if op == "arith.minsi" else max
        return pick(a[0], b[0]), pick(a[1], b[1])
    if op == "arith.andi" and max(a[0], b[0]) >= 0:
        return 0, min(each[1] for each in (a, b) if each[0] >= 0)
    if a[0] < 0 or b[0] < 0:
        return None
    # Of numbers that are not negative.
    if op in ("arith.divsi", "arith.divui"):
        return a[0] // max(1, b[1]), a[1] // max(1, b[0])
    if op in ("arith.remsi", "arith.remui"):
        return 0, min(a[1], max(0, b[1] - 1))
    if op in ("arith.shrsi", "arith.shrui"):
        return a[0] >> min(b[1], 64), a[1] >> b[0]
    if op in ("arith.ori", "arith.xori"):
        return 0, (1 << max(a[1], b[1]).bit_length()) - 1
    return None


def _result_type(text: str) -> str:
    """Type of a result: behind `->` or `to`, else behind the last colon."""
    for separator in (" -> ", " to "):
        if separator in text:
            return text.rsplit(separator, 1)[1].strip()
    return text.rsplit(" : ", 1)[-1].split(", ")[-1].strip() if " : " in text else ""


def _bits(kind: str) -> int:
    if "ptr" in kind:
        return 0
    found = _INTEGER.search(kind.split(",")[0].strip())
    return 0 if found is None else int(found[1][1:])


def _range(bits: int) -> Interval:
    return (0, 1) if bits == 1 else (0, 0) if bits == 0 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
