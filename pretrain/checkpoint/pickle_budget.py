"""Refusal of pickles that ask for far more than they hold, before any object is made of them.

A pickle remembers objects, and takes them as often as it likes at two bytes each. Of a tuple of twice the tuple before,
60 times over, no more is kept than of 60 tuples; but whoever hashes, prints or walks the last one, as a dictionary does
with its keys, walks 2^60 elements. And what is called with a remembered text makes as many copies of it as there are
calls. So the opcodes are gone through first, on a stack of weights alone: every object weighs what it would take if
nothing in it were shared, and taking a remembered one uses up the budget by its weight.
"""

from __future__ import annotations

import pickle
import pickletools
from functools import cache
from typing import Any

_MOST_DEPTH = 200
_LEAST_BUDGET = 2**24
# Indexes take names of some 100 characters with opcodes of two to five bytes, among others.
_BUDGET_PER_BYTE = 64


class _Object:
    """An object that has others.

    Attributes:
        weight: elements and characters in it.
        depth: levels of objects in objects.
        is_taken: True if it was taken from those that are remembered.
    """

    __slots__ = ("depth", "is_taken", "weight")

    def __init__(self, weight: int, depth: int) -> None:
        self.weight, self.depth, self.is_taken = weight, depth, False


# A number stands for an object without others, by its weight. Not a union, for which `isinstance` would have to be asked
# millions of times.
_Entry = Any


def check_budget(content: bytes) -> None:
    """Go through a pickle's opcodes.

    Raises:
        pickle.UnpicklingError: the pickle is damaged, nests objects too deep, or asks for more than its length allows.
    """
    try:
        _Weights(content).go_through()
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError("it ends early, or is damaged") from error


class _Weights:
    """The stack and the memory of an unpickler, with weights for objects."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._left = _LEAST_BUDGET + _BUDGET_PER_BYTE * len(content)
        self._stack: list[_Entry] = []
        self._marks: list[int] = []
        self._memory: dict[int, _Entry] = {}

    def go_through(self) -> None:
        """Go through the opcodes, up to the one that ends the pickle; there may be tens of millions."""
        content, stack, marks, memory = self._content, self._stack, self._marks, self._memory
        opcodes, at = _opcodes(), 0
        while True:
            kind, size, num_taken, name = opcodes[content[at]]
            at += 1
            end = at + size if size >= 0 else self._end(name, at, size)
            if kind == _MAKE:
                stack.append(1 + end - at)
            elif kind == _MEMOIZE:
                memory[len(memory)] = stack[-1]
            elif kind == _TAKE:
                self._take(memory[content[at] if size == 1 else _number(content[at:end], name)])
            elif kind == _MARK:
                marks.append(len(stack))
            elif kind <= _LAST_JOINING:
                first = (marks.pop() if kind >= _FIRST_MARKED else len(stack)) - num_taken
                if first < 0:
                    raise IndexError(first)
                joined = _joined(stack[first:], kind)
                stack[first:] = (joined,)
            elif kind == _PUT:
                self._put(_number(content[at:end], name))
            elif kind == _STOP:
                return
            elif name == "DUP":
                self._take(stack[-1])
            elif name == "POP" and (not marks or marks[-1] < len(stack)):
                stack.pop()
            elif name in ("POP", "POP_MARK"):
                # `POP` takes away a mark, too.
                del stack[marks.pop() :]
            at = end

    def _end(self, name: str, at: int, size: int) -> int:
        """Place behind an argument at `at`: a line, or two, or a number of `-size` bytes and as many bytes as it says."""
        if size == _LINE:
            end = self._content.index(b"\n", at) + 1
            return self._content.index(b"\n", end) + 1 if name in _TWO_LINES else end
        start = at - size
        end = start + int.from_bytes(self._content[at:start], "little")
        if end > len(self._content):
            # An unpickler may make room for all of them before it reads.
            raise pickle.UnpicklingError(f"it has an object of {end - start} bytes, and ends before")
        return end

    def _take(self, entry: _Entry) -> None:
        if entry.__class__ is _Object:
            entry.is_taken = True
            self._left -= entry.weight
        else:
            self._left -= entry
        if self._left < 0:
            raise pickle.UnpicklingError("it takes the same objects again and again, past all memory and time")
        self._stack.append(entry)

    def _put(self, number: int) -> None:
        if not 0 <= number <= len(self._content):
            # An unpickler makes room for all smaller ones.
            raise pickle.UnpicklingError(f"it numbers an object {number}, and has {len(self._content)} bytes")
        self._memory[number] = self._stack[-1]


def _joined(entries: list[_Entry], kind: int) -> _Object:
    """The object that an opcode makes of some; or the first of them, which grows by the others."""
    weight, depth = 1, 1
    grown = entries[0] if kind in _GROWING and entries[0].__class__ is _Object else None
    for entry in entries:
        if entry.__class__ is _Object:
            weight += entry.weight
            if entry.depth >= depth and entry is not grown:
                depth = entry.depth + 1
        else:
            weight += entry
    if depth > _MOST_DEPTH:
        raise pickle.UnpicklingError(f"it has objects in {_MOST_DEPTH} others")
    if grown is None:
        return _Object(weight, depth)
    if grown.is_taken and kind != _BUILD:
        # It was lighter when it was taken than it is.
        raise pickle.UnpicklingError("it has an object that grows after it was used")
    grown.weight, grown.depth = weight, max(grown.depth, depth)
    return grown


def _number(argument: bytes, name: str) -> int:
    return int(argument) if name in ("GET", "PUT") else int.from_bytes(argument, "little")


# Kinds of opcodes: those that join objects, of which the last take what is above a mark; those that do without.
_JOIN, _GROW, _BUILD, _JOIN_MARKED, _GROW_MARKED, _MAKE, _MEMOIZE, _TAKE, _MARK, _PUT, _STOP, _OTHER = range(12)
_FIRST_MARKED, _LAST_JOINING = _JOIN_MARKED, _GROW_MARKED
_GROWING = (_GROW, _BUILD, _GROW_MARKED)
_KINDS = {
    **dict.fromkeys(("APPEND", "SETITEM"), _GROW),
    **dict.fromkeys(("APPENDS", "SETITEMS", "ADDITEMS"), _GROW_MARKED),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _TAKE),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _PUT),
    **dict.fromkeys(("POP", "POP_MARK", "DUP", "PROTO", "FRAME"), _OTHER),
    # So that these can grow.
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _JOIN),
    "BUILD": _BUILD,
    "MEMOIZE": _MEMOIZE,
    "MARK": _MARK,
    "STOP": _STOP,
}
# In place of the number of bytes that say how many follow, negative.
_LINE = -9
_TWO_LINES = ("GLOBAL", "INST")
_SIZES = {
    pickletools.UP_TO_NEWLINE: _LINE,
    pickletools.TAKEN_FROM_ARGUMENT1: -1,
    pickletools.TAKEN_FROM_ARGUMENT4: -4,
    pickletools.TAKEN_FROM_ARGUMENT4U: -4,
    pickletools.TAKEN_FROM_ARGUMENT8U: -8,
}


@cache
def _opcodes() -> dict[int, tuple[int, int, int, str]]:
    """Kind of every opcode by its byte, size of its argument, how many objects it takes (below a mark), and its name."""
    found = {}
    for opcode in pickletools.opcodes:
        before = opcode.stack_before
        is_marked = pickletools.markobject in before
        num_taken = before.index(pickletools.markobject) if is_marked else len(before)
        kind = _JOIN_MARKED if is_marked else _JOIN if before else _MAKE
        argument = 0 if opcode.arg is None else opcode.arg.n
        size = _SIZES.get(argument, argument)
        found[ord(opcode.code)] = (_KINDS.get(opcode.name, kind), size, num_taken, opcode.name)
    return found
