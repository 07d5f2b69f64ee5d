"""Machine code of a kernel (SASS): its instructions, its control flow, and the way of one warp through it.

An instruction of compute capability 7.0 and later has 128 bits, of which the upper ones say how it is issued: cycles
until the next, the scoreboard that it sets when its result is there, and the scoreboards that it waits for. So the
waits of a warp need not be guessed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

import kernels

_LINE = re.compile(r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LOW = re.compile(r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_HIGH = re.compile(r"^\s+/\* (?P<bits>0x[0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(?P<label>\S+):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_GUARD = re.compile(r"^@!?U?P(?:T|\d+)\s+")
# Lower bits of an instruction that hold none of its control bits.
_CONTROL_SHIFT = 41


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in bytes from the kernel's start.
        text: without its guard.
        is_guarded: whether a predicate decides if it takes effect.
        stall: cycles until the next one is issued.
        sets: scoreboard that is set when its result is there; None: its result comes after a fixed time, which `stall`
            of whoever stands between covers.
        frees: scoreboard that is set when its operands were read; None: likewise.
        waits: scoreboards that it waits for.
        source: file and line of the source that it comes from, the innermost call's first, and its callers'.
    """

    address: int
    text: str
    is_guarded: bool
    stall: int
    sets: int | None
    frees: int | None
    waits: tuple[int, ...]
    source: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Name with its modifiers, as in LDG.E.64."""
        return self.text.split()[0]

    @property
    def op(self) -> str:
        return self.name.partition(".")[0]

    @property
    def load_bytes(self) -> int:
        """Bytes that a load from device memory brings to a thread; 0 for any other instruction."""
        if self.op not in ("LDG", "LD"):
            return 0
        parts = self.name.split(".")
        bits = next((int(part) for part in parts if part.isdigit()), None)
        return (bits or (16 if "U16" in parts or "S16" in parts else 8 if "U8" in parts or "S8" in parts else 32)) // 8


@dataclass(frozen=True, eq=False)
class Block:
    """Instructions that run one after the other.

    Attributes:
        instructions: at least one.
        successors: numbers of the blocks that may follow; first the one that follows where a branch is not taken.
    """

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class SourceLoop:
    """A `for` or `while` of a kernel's source, as in `_above: while num_above > CAPACITY`."""

    function: str
    header: str

    def __str__(self) -> str:
        return f"{self.function}: {self.header}"


@dataclass(frozen=True, eq=False)
class Loop:
    """A natural loop.

    Attributes:
        header: number of its first block.
        blocks: numbers of all of its blocks.
        source: the loop of the source that it is; None: none of ours.
    """

    header: int
    blocks: frozenset[int]
    source: SourceLoop | None


class Code:
    """The machine code of one kernel."""

    def __init__(self, listing: str, *, kernel: str) -> None:
        """Read what `nvdisasm -g -hex -c` prints.

        Raises:
            ValueError: it has no such kernel.
        """
        self.kernel = kernel
        instructions, labels = _read(listing, kernel)
        if not instructions:
            raise ValueError(f"the disassembly has no instructions of {kernel}")
        self.blocks = _blocks(instructions, labels)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All that a warp may reach, in the order of addresses, without padding."""
        reached = _reachable(self.blocks)
        return tuple(
            each for number, block in enumerate(self.blocks) if number in reached for each in block.instructions
        )

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Its loops, the outer ones before the inner ones."""
        dominators = _dominators(self.blocks)
        found: dict[int, set[int]] = {}
        for number in dominators:
            for header in self.blocks[number].successors:
                if header in dominators[number]:
                    found.setdefault(header, {header}).update(_body(self.blocks, dominators, header, number))
        by_size = sorted(found.items(), key=lambda item: -len(item[1]))
        return tuple(
            Loop(header, frozenset(blocks), self._source_of(header, blocks, found)) for header, blocks in by_size
        )

    def _source_of(self, header: int, blocks: set[int], loops: dict[int, set[int]]) -> SourceLoop | None:
        inner = {number for other, body in loops.items() if other != header and body < blocks for number in body}
        own = [each for number in blocks - inner for each in self.blocks[number].instructions]
        votes: dict[SourceLoop, int] = {}
        for instruction in own:
            for file, line in instruction.source:
                if (loop := _innermost_loop(file, line)) is not None:
                    votes[loop] = votes.get(loop, 0) + 1
                    break
        return max(votes, key=lambda loop: votes[loop]) if votes else None

    @cached_property
    def load_widths(self) -> dict[int, int]:
        """Loads from device memory by the bytes that each brings to a thread."""
        widths: dict[int, int] = {}
        for instruction in self.instructions:
            if instruction.load_bytes:
                widths[instruction.load_bytes] = widths.get(instruction.load_bytes, 0) + 1
        return widths


def _read(listing: str, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of the kernel's section, and the addresses that labels stand for."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    source: list[tuple[str, int]] = []
    pending: re.Match[str] | None = None
    inside, fresh = False, True
    for line in listing.splitlines():
        if line.split(maxsplit=1)[:1] == [".section"]:
            inside = f".text.{kernel}," in line
        elif not inside:
            continue
        elif marked := _LINE.search(line):
            # Several lines in a row tell the calls that were inlined, the innermost first.
            source = [*([] if fresh else source), (marked["file"], int(marked["line"]))]
            fresh = False
        elif label := _LABEL.match(line):
            waiting.append(label["label"])
        elif low := _LOW.match(line):
            pending, fresh = low, True
            labels |= dict.fromkeys(waiting, int(low["address"], 16))
            waiting = []
        elif pending is not None and (high := _HIGH.match(line)):
            instructions.append(_instruction(pending, int(high["bits"], 16), tuple(source)))
            pending = None
    return instructions, labels


def _instruction(low: re.Match[str], high: int, source: tuple[tuple[str, int], ...]) -> Instruction:
    control = high >> _CONTROL_SHIFT
    text = low["text"]
    sets, frees = control >> 5 & 7, control >> 8 & 7
    return Instruction(
        address=int(low["address"], 16),
        text=_GUARD.sub("", text),
        is_guarded=_GUARD.match(text) is not None and not text.startswith(("@PT ", "@UPT ")),
        stall=control & 15,
        # 7 is none.
        sets=None if sets == 7 else sets,
        frees=None if frees == 7 else frees,
        waits=tuple(number for number in range(6) if control >> 11 >> number & 1),
        source=source,
    )


def _blocks(instructions: Sequence[Instruction], labels: dict[str, int]) -> tuple[Block, ...]:
    targets = {each.address: _target(each, labels) for each in instructions if each.op in ("BRA", "BRX")}
    starts = {instructions[0].address, *(target for target in targets.values() if target is not None)}
    for before, after in pairwise(instructions):
        if _ends_block(before):
            starts.add(after.address)
    numbers = {address: number for number, address in enumerate(sorted(starts))}
    groups: list[list[Instruction]] = [[] for _ in numbers]
    for instruction in instructions:
        if instruction.address in numbers:
            current = groups[numbers[instruction.address]]
        current.append(instruction)
    blocks = []
    for number, group in enumerate(groups):
        last = group[-1]
        follows = [number + 1] if number + 1 < len(groups) else []
        if last.op in ("EXIT", "RET", "BRX"):
            successors = follows if last.is_guarded else []
        elif last.op == "BRA":
            target = targets[last.address]
            taken = [] if target is None else [numbers[target]]
            successors = [*(follows if last.is_guarded or _is_conditional(last) else []), *taken]
        else:
            successors = follows
        blocks.append(Block(tuple(group), tuple(successors)))
    return tuple(blocks)


def _ends_block(instruction: Instruction) -> bool:
    return instruction.op in ("BRA", "BRX", "EXIT", "RET")


def _is_conditional(branch: Instruction) -> bool:
    """True of `BRA.DIV`, and of a branch with a predicate among its operands."""
    return ".DIV" in branch.name or re.match(r"BRA\S*\s+!?U?P\d", branch.text) is not None


def _target(branch: Instruction, labels: dict[str, int]) -> int | None:
    named = _TARGET.search(branch.text)
    return None if named is None else labels.get(named[1])


def _reachable(blocks: Sequence[Block]) -> set[int]:
    reached, waiting = {0}, [0]
    while waiting:
        for number in blocks[waiting.pop()].successors:
            if number not in reached:
                reached.add(number)
                waiting.append(number)
    return reached


def _dominators(blocks: Sequence[Block]) -> dict[int, set[int]]:
    """For each block that can be reached, the blocks that every way to it passes."""
    reached = sorted(_reachable(blocks))
    before: dict[int, list[int]] = {number: [] for number in reached}
    for number in reached:
        for after in blocks[number].successors:
            before[after].append(number)
    dominators = {number: set(reached) for number in reached}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for number in reached[1:]:
            own = set.intersection(*(dominators[each] for each in before[number])) | {number}
            changed = changed or own != dominators[number]
            dominators[number] = own
    return dominators


def _body(blocks: Sequence[Block], dominators: dict[int, set[int]], header: int, last: int) -> Iterator[int]:
    """Blocks from which `last` is reached without passing `header`."""
    seen, waiting = {header}, [last]
    while waiting:
        number = waiting.pop()
        if number not in seen:
            seen.add(number)
            yield number
            waiting += [each for each in dominators if number in blocks[each].successors]


@lru_cache(maxsize=4096)
def _innermost_loop(file: str, line: int) -> SourceLoop | None:
    """The innermost loop of a Python file around a line; None outside of loops, and in Triton's own functions."""
    path = _here(Path(file))
    if path is None:
        return None
    best: tuple[int, SourceLoop] | None = None
    for function in (each for each in ast.walk(_tree(path)) if isinstance(each, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, (ast.For, ast.While)) and node.lineno <= line <= (node.end_lineno or node.lineno):
                # Written out, so no loop of the machine.
                if isinstance(node, ast.For) and ast.unparse(node.iter).startswith("tl.static_range("):
                    continue
                if isinstance(node, ast.For):
                    header = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
                else:
                    header = f"while {ast.unparse(node.test)}"
                if best is None or node.lineno > best[0]:
                    best = node.lineno, SourceLoop(function.name, header)
    return None if best is None else best[1]


def _here(path: Path) -> Path | None:
    """The file that a compiler read; None if it is Triton's.

    Triton's cache looks at contents, and gives out what was built of the same file in another folder.
    """
    if "kernels" in path.parts:
        after = len(path.parts) - path.parts[::-1].index("kernels")
        path = Path(kernels.__file__).parent.joinpath(*path.parts[after:])
    return None if "triton" in path.parts or not path.exists() else path


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
