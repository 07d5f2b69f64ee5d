"""Machine code as `nvdisasm` lists it, and the way of a warp through it, against hand-written listings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.bench.static.reads import Reads
from lab.bench.static.sass import Code, SourceLoop
from lab.bench.static.warp import Latencies, follow

LATENCIES = Latencies(load=100, shared=10, other=5, operands=3, barrier=7)


def listing(*lines: str | tuple[str, int, Sequence[int], int | None]) -> str:
    """A listing of a kernel named k: labels, and instructions with stall, scoreboards waited for and the one set."""
    text, address = ['\t.section\t.text.k,"ax",@progbits'], 0
    for line in lines:
        if isinstance(line, str):
            text.append(line)
            continue
        instruction, stall, waits, sets = line
        control = stall | (7 if sets is None else sets) << 5 | 7 << 8 | sum(1 << board for board in waits) << 11
        text += [
            f"        /*{address:04x}*/                   {instruction} ;  /* 0x{0:016x} */",
            f"                                             /* 0x{control << 41:016x} */",
        ]
        address += 16
    return "\n".join(text)


def test_loads_are_counted_by_their_width() -> None:
    code = Code(
        listing(
            ("LDG.E.128 R4, desc[UR4][R2.64]", 1, [], 0),
            ("@P0 LDG.E.64.CONSTANT R8, desc[UR4][R2.64]", 1, [], 0),
            ("LDG.E R9, desc[UR4][R2.64]", 1, [], 0),
            ("@!P1 LDG.E.U16 R10, desc[UR4][R2.64]", 1, [], 0),
            ("LDG.E.U8 R11, desc[UR4][R2.64]", 1, [], 0),
            ("LDS.128 R12, [R2]", 1, [], 0),
            ("EXIT", 5, [], None),
            # Padding, which nothing reaches.
            (".L_x_1:"),
            ("LDG.E.128 R4, desc[UR4][R2.64]", 1, [], 0),
        ),
        kernel="k",
    )
    assert code.load_widths == {16: 1, 8: 1, 4: 1, 2: 1, 1: 1}
    with pytest.raises(ValueError, match="no instructions of other"):
        Code(listing(("EXIT", 5, [], None)), kernel="other")


def test_a_load_that_waits_for_a_load_comes_after_it() -> None:
    independent = [
        ("LDG.E R4, [R2]", 2, [], 0),
        ("LDG.E R6, [R3]", 2, [], 1),
        ("IADD3 R4, R4, R6, RZ", 4, [0, 1], None),
    ]
    way = follow(Code(listing(*independent, ("EXIT", 5, [], None)), kernel="k"), lambda loop: 1, LATENCIES)
    # The second is issued at 2 and there at 102; the sum stalls for 4 and the end for 5.
    assert (way.instructions, way.chain, way.cycles) == (4, 1, 111)
    dependent = [("LDG.E R4, [R2]", 2, [], 0), ("LDG.E R6, [R4]", 2, [0], 1), ("IADD3 R4, R4, R6, RZ", 4, [1], None)]
    way = follow(Code(listing(*dependent, ("EXIT", 5, [], None)), kernel="k"), lambda loop: 1, LATENCIES)
    assert (way.instructions, way.chain, way.cycles) == (4, 2, 209)


LOOP = (
    ("MOV R2, RZ", 1, [], None),
    # Around the loop, if it has nothing to do.
    ("@P0 BRA `(.L_x_2)", 5, [], None),
    ".L_x_1:",
    ("LDG.E R4, [R2]", 1, [], 0),
    ("@P1 BRA `(.L_x_3)", 5, [0], None),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", 1, [], None),
    ".L_x_4:",
    ("@P2 BRA `(.L_x_1)", 5, [], None),
    ".L_x_2:",
    ("EXIT", 5, [], None),
    # The rare case, elsewhere and longer.
    ".L_x_3:",
    *[("IADD3 R9, R9, R9, RZ", 4, [], None)] * 20,
    ("BRA `(.L_x_4)", 5, [], None),
)


@pytest.mark.parametrize("trips", [0, 1, 2, 5.5, 100])
def test_a_loop_takes_its_iterations(trips: float) -> None:
    code = Code(listing(*LOOP), kernel="k")
    assert [sorted(loop.blocks) for loop in code.loops] == [[1, 2, 3, 5]]
    way = follow(code, lambda loop: trips, LATENCIES)
    # Load, branch, barrier, branch; the rare case is left out.
    assert way.instructions == 2 + 4 * trips + 1
    assert way.barriers == trips
    assert way.chain == trips
    # 100 of the load, 5 and 5 of the branches, 7 and 1 of the barrier.
    assert way.cycles == pytest.approx(1 + 5 + 118 * trips + 5)


def test_a_loop_is_named_by_its_source(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("def mine(x):\n    for i in range(x):\n        while x > i:\n            x -= 1\n    return x\n")
    inner = f'\t//## File "{source}", line 4'
    outer = f'\t//## File "{source}", line 2'
    code = Code(
        listing(
            ("MOV R2, RZ", 1, [], None),
            ".L_x_0:",
            outer,
            ("IADD3 R2, R2, R2, RZ", 1, [], None),
            ".L_x_1:",
            inner,
            ("IADD3 R3, R3, R3, RZ", 1, [], None),
            ("@P0 BRA `(.L_x_1)", 5, [], None),
            outer,
            ("@P0 BRA `(.L_x_0)", 5, [], None),
            ("EXIT", 5, [], None),
        ),
        kernel="k",
    )
    assert [loop.source for loop in code.loops] == [
        SourceLoop("mine", "for i in range(x)"),
        SourceLoop("mine", "while x > i"),
    ]
    way = follow(code, lambda loop: 3 if loop == code.loops[0].source else 4, LATENCIES)
    assert way.instructions == 1 + 3 * (1 + 4 * 2 + 1) + 1


@pytest.mark.parametrize("exponent", [0.0, 0.8])
def test_reads_are_those_of_drawn_entries(exponent: float) -> None:
    """Against a loop over the sorted entries themselves."""
    reads = Reads(num_rows=300, num_entries=5000, exponent=exponent)
    entries = [row for row, count in enumerate(reads.counts) for _ in range(count)]
    assert len(entries) == pytest.approx(5000, rel=0.05)
    assert reads.num_distinct == len(set(entries))
    block, slots = 8, 3
    begins = [i for i in range(len(entries)) if (i - entries.index(entries[i])) % block == 0]
    cuts = [min([b for b in begins if b >= at], default=len(entries)) for at in range(0, len(entries), slots * block)]
    lengths = [end - at for at, end in zip(cuts, [*cuts[1:], len(entries)], strict=True)]
    assert reads.run_lengths(block, slots).tolist() == lengths
    by_count = sorted(reads.counts.tolist(), reverse=True)
    for cached in (0, 7, 300, 400):
        assert reads.misses(cached) == sum(count > 0 for count in by_count[:cached]) + sum(by_count[cached:])
    # Few rows are read most where reads are skewed.
    assert (by_count[0] > 4 * 5000 / 300) == (exponent > 0)
