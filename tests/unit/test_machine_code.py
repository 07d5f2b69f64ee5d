"""Machine code as `nvdisasm` lists it, and its loops, against hand-written listings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.kernels.machine_code.sass import Code


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


def test_a_loop_has_its_blocks_wherever_they_lie() -> None:
    code = Code(listing(*LOOP), kernel="k")
    assert [sorted(loop.blocks) for loop in code.loops] == [[1, 2, 3, 5]]


def test_an_instruction_knows_its_source_and_outer_loops_come_first(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    inner, outer = (f'\t//## File "{source}", line {line}' for line in (4, 2))
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
    assert [sorted(loop.blocks) for loop in code.loops] == [[1, 2, 3], [2]]
    assert [each.source[0][1] if each.source else None for each in code.instructions] == [None, 2, 4, 4, 2, 2]
