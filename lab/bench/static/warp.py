"""The way of one warp through a kernel's machine code: instructions issued, cycles, and loads that wait for loads.

The warp is alone. It issues in order: an instruction waits for its scoreboards, and the next one for its stall. Where
the way forks it takes the side with the loops that are entered, else what follows the branch: compilers put the rarer
side elsewhere. Other warps of its block are taken to reach barriers when it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lab.bench.static.sass import Block, Code, Instruction, Loop, SourceLoop

Trips = Callable[[SourceLoop | None], float]
"""Iterations of a loop each time that it is entered."""

# Iterations that are followed one by one. Later ones take what the last of these takes.
_FOLLOWED = 3
NUM_SCOREBOARDS = 6


@dataclass(frozen=True)
class Latencies:
    """Cycles from an instruction's issue to its result, where a scoreboard tells of it.

    Attributes:
        load: from device memory.
        shared: loads from shared memory, and exchanges between a warp's threads.
        other: conversions, reciprocals, special registers and constants.
        operands: until operands that may be overwritten were read.
        barrier: of a block whose warps arrive together.
        counts_issue: whether an instruction's own stall counts.
    """

    load: float
    shared: float = 29.0
    other: float = 24.0
    operands: float = 12.0
    barrier: float = 20.0
    counts_issue: bool = True

    def of(self, instruction: Instruction) -> float:
        if instruction.load_bytes or instruction.op in ("ATOM", "ATOMG"):
            return self.load
        return self.shared if instruction.op in ("LDS", "SHFL", "LDSM", "ATOMS", "REDUX") else self.other


# Nothing but loads that wait for one another takes time.
_CHAIN = Latencies(load=1, shared=0, other=0, operands=0, barrier=0, counts_issue=False)


@dataclass(frozen=True)
class LoopFigures:
    """Figures of one loop, per iteration.

    Attributes:
        source: the loop in the source.
        trips: iterations each time that it is entered.
        instructions: issued by a warp, inner loops included.
        barriers: of the block.
        chain: loads from device memory that wait for one another.
        cycles: of a warp that is alone.
    """

    source: SourceLoop | None
    trips: float
    instructions: float
    barriers: float
    chain: float
    cycles: float


@dataclass(frozen=True)
class Way:
    """Figures of a warp's whole way.

    Attributes:
        instructions: issued.
        barriers: of the block.
        chain: loads from device memory that wait for one another.
        cycles: of a warp that is alone.
        loops: its loops, outer ones first.
    """

    instructions: float
    barriers: float
    chain: float
    cycles: float
    loops: tuple[LoopFigures, ...]


def follow(code: Code, trips: Trips, latencies: Latencies) -> Way:
    """Send one warp through a kernel."""
    timed, chained = _Warp(code, trips, latencies), _Warp(code, trips, _CHAIN)
    timed.run()
    chained.run()
    loops = tuple(
        LoopFigures(
            loop.source,
            trips(loop.source),
            timed.per_iteration[loop.header].instructions,
            timed.per_iteration[loop.header].barriers,
            chained.per_iteration[loop.header].clock,
            timed.per_iteration[loop.header].clock,
        )
        for loop in code.loops
        if loop.header in timed.per_iteration
    )
    end = timed.state
    return Way(end.instructions, end.barriers, chained.finished(), timed.finished(), loops)


@dataclass
class _State:
    clock: float = 0.0
    instructions: float = 0.0
    barriers: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * NUM_SCOREBOARDS)

    def minus(self, other: _State) -> _State:
        return _State(self.clock - other.clock, self.instructions - other.instructions, self.barriers - other.barriers)

    def add(self, step: _State, times: float) -> None:
        """So many more iterations: what is under way moves along."""
        self.clock += step.clock * times
        self.instructions += step.instructions * times
        self.barriers += step.barriers * times
        self.boards = [board + step.clock * times for board in self.boards]


class _Warp:
    def __init__(self, code: Code, trips: Trips, latencies: Latencies) -> None:
        self._code, self._trips, self._latencies = code, trips, latencies
        self._loops: Mapping[int, Loop] = {loop.header: loop for loop in code.loops}
        self._worth: dict[tuple[int, int | None], float] = {}
        self.state = _State()
        self.per_iteration: dict[int, _State] = {}

    def run(self) -> None:
        number: int | None = 0
        while number is not None:
            number = self._pass(number, None)

    def finished(self) -> float:
        """The clock when all that is under way has ended."""
        return max([self.state.clock, *self.state.boards])

    def _pass(self, number: int, inside: Loop | None) -> int | None:
        """Go through a block, or a whole loop that begins there; the block after it, or None at the end."""
        loop = self._loops.get(number)
        if loop is not None and loop is not inside:
            return self._pass_loop(loop, inside)
        block = self._code.blocks[number]
        for instruction in block.instructions:
            self._issue(instruction)
        return self._next(block, inside)

    def _pass_loop(self, loop: Loop, outer: Loop | None) -> int | None:
        trips = self._trips(loop.source)
        followed = min(_FOLLOWED, int(trips))
        step = _State()
        for _ in range(followed):
            before = _State(self.state.clock, self.state.instructions, self.state.barriers)
            number: int | None = loop.header
            while number is not None:
                number = self._pass(number, loop)
                if number == loop.header:
                    break
            step = self.state.minus(before)
        if followed:
            self.per_iteration[loop.header] = step
            self.state.add(step, trips - followed)
        exits = [
            after
            for inner in sorted(loop.blocks, reverse=True)
            for after in self._code.blocks[inner].successors
            if after not in loop.blocks and (outer is None or after in outer.blocks)
        ]
        return max(exits, key=lambda after: self._value(after, outer)) if exits else None

    def _next(self, block: Block, inside: Loop | None) -> int | None:
        allowed = [each for each in block.successors if inside is None or each in inside.blocks]
        return max(allowed, key=lambda each: self._value(each, inside)) if allowed else None

    def _value(self, number: int, inside: Loop | None) -> float:
        """Loops ahead, less those that are entered and left at once."""
        if inside is not None and number == inside.header:
            return 0.0
        key = number, None if inside is None else inside.header
        if key in self._worth:
            return self._worth[key]
        # Also the end of a search that comes back to where it began.
        self._worth[key] = 0.0
        loop = self._loops.get(number)
        if loop is None:
            own, onwards = 0.0, [self._code.blocks[number]]
        else:
            own, onwards = (1.0 if self._trips(loop.source) else -1.0), [self._code.blocks[b] for b in loop.blocks]
        ahead = [
            self._value(after, inside)
            for block in onwards
            for after in block.successors
            if (inside is None or after in inside.blocks) and (loop is None or after not in loop.blocks)
        ]
        self._worth[key] = own + max(ahead, default=0.0)
        return self._worth[key]

    def _issue(self, instruction: Instruction) -> None:
        state, latencies = self.state, self._latencies
        start = max([state.clock, *(state.boards[board] for board in instruction.waits)])
        if instruction.op == "BAR":
            start += latencies.barrier
            state.barriers += 1
        if instruction.sets is not None:
            done = start + latencies.of(instruction)
            state.boards[instruction.sets] = max(state.boards[instruction.sets], done)
        if instruction.frees is not None:
            done = start + latencies.operands
            state.boards[instruction.frees] = max(state.boards[instruction.frees], done)
        state.instructions += 1
        state.clock = start + (max(1, instruction.stall) if latencies.counts_issue else 0)
