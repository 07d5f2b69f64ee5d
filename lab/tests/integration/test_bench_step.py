"""The command that says where a step's time goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import Megamem

from lab.bench.part_costs import Part

QUICK = ("--rounds", 1, "--steps", 1)


def shares(text: str, indent: int) -> list[float]:
    return [float(share) for share in re.findall(rf"^ {{{indent}}}[a-z].* ms +([\d.]+)%", text, re.MULTILINE)]


def test_a_memory_beside_its_pair(megamem: Megamem, config_file: Path) -> None:
    # As wide as a mixture of eight experts needs.
    changes = ("model.ffn_hidden_size=256", "model.memory.num_keys=48")
    result = megamem("bench", "step", config_file, *changes, "--pair", "--nproc", 1, *QUICK)
    assert result.code == 0, result.output
    header, memory, dense, experts, end = result.output.strip().split("\n\n")
    assert header.startswith("1 rank, CPU")
    assert "1 rounds of 1 steps" in header
    for text, name in ((memory, ""), (dense, ", dense"), (experts, ", experts")):
        assert text.startswith(f"{config_file}{name}\n")
        assert re.search(r"step [\d.]+ ms \(.*MFU unknown", text)
    assert re.search(r"derived: model.ffn_hidden_size \d+", dense)
    assert re.search(r"derived: 8 of \d+ experts of width \d+", experts)
    # Rounded to a tenth.
    phases, parts = memory.split("the memory in it")
    assert sum(shares(phases, 4)) == pytest.approx(100, abs=0.5)
    (whole,) = re.findall(r"^ +[\d.]+ ms +([\d.]+)%", parts)
    assert sum(shares(parts, 4)) == pytest.approx(float(whole), abs=1)
    printed = re.findall(r"^    ([a-z][a-z_ ]+?)  +", parts, re.MULTILINE)
    # Tables are whole: nothing is exchanged.
    assert printed == [part for part in Part if part != "exchange"]
    assert re.search(rf"1\.000x  {re.escape(str(config_file))}\n", end)
    assert "takes" in end.splitlines()[-1]


def test_tables_split_over_ranks_show_their_exchange(megamem: Megamem, config_file: Path) -> None:
    layouts = ("parallel.pipeline=1", "parallel.tensor=1", "--vary", "parallel.memory=1,2", "--nproc", 2)
    result = megamem("bench", "step", config_file, *layouts, *QUICK)
    assert result.code == 0, result.output
    whole, split = result.output.split("\n\n")[1:3]
    assert "exchange" not in whole
    assert re.search(r"^    exchange .* MB, [\d.e+-]+ GB/s$", split, re.MULTILINE)
