"""Machine code of a kernel (SASS): its instructions and its control flow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

_LINE = re.compile(r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LOW = re.compile(r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_LABEL = re.compile(r"^(?P<label>\S+):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_GUARD = re.compile(r"^@!?U?P(?:T|\d+)\s+")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in bytes from the kernel's start.
        text: without its guard.
        is_guarded: a predicate decides if it takes effect.
        source: file and line of the source that it comes from, the innermost call's first, and its callers'.
    """

    address: int
    text: str
    is_guarded: bool
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


@dataclass(frozen=True, eq=False)
class Loop:
    """A natural loop.

    Attributes:
        header: number of its first block.
        blocks: numbers of all of its blocks.
    """

    header: int
    blocks: frozenset[int]


class Code:
    """The machine code of one kernel."""

    def __init__(self, listing: str, *, kernel: str) -> None:
        """Read what `nvdisasm -g -hex -c` prints.

        Raises:
            ValueError: the listing has no such kernel.
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
        return tuple(Loop(header, frozenset(blocks)) for header, blocks in by_size)

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
            fresh = True
            labels |= dict.fromkeys(waiting, int(low["address"], 16))
            waiting = []
            instructions.append(_instruction(low, tuple(source)))
    return instructions, labels


def _instruction(low: re.Match[str], source: tuple[tuple[str, int], ...]) -> Instruction:
    text = low["text"]
    return Instruction(
        address=int(low["address"], 16),
        text=_GUARD.sub("", text),
        is_guarded=_GUARD.match(text) is not None and not text.startswith(("@PT ", "@UPT ")),
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
