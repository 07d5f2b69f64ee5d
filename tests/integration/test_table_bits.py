"""The figures of tables in fewer bits come from a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="exported models are loaded with it: pip install '.[hf]'")


def test_logits_move_the_more_the_fewer_bits_tables_have(saved_run: Path) -> None:
    command = [sys.executable, "-m", "lab.maintenance.table_bits", str(saved_run), __file__, "48"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in made.stdout.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["as weights", "int8", "int4"]
    whole, in_8, in_4 = (float(row[1].removesuffix(" MB")) for row in rows)
    assert whole > in_8 > in_4
    largest, average = ([float(row[column]) for row in rows[1:]] for column in (3, 4))
    assert 0 < largest[0] < largest[1]
    assert average[0] < average[1] < largest[1]
    assert [row[5].endswith(" of 48") for row in rows[1:]] == [True, True]
