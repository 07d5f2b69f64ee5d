"""Tests of the reader of metrics, history and jobs: bad rows are named, and the others are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.run.metric_rows import numbered_rows, parse_row, read_rows
from slurm.lead import last_step, lead_seconds
from tools.common.metrics import read_metrics

BAD = {
    b"\xff": "has a byte that is not UTF-8 (0xff)",
    b"{": "is not JSON",
    b"": "is not JSON",
    b"[" * 100_000: "is not JSON",
    b"[1]": "is not an object",
    b"3": "is not an object",
    b'{"loss": 1.0}': "has no `step`",
    b'{"step": "3"}': "has no int as its `step`",
    b'{"step": true}': "has no int as its `step`",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_row_is_named_and_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 5.0, "save_s": 90.0}\n' + line + b'\n{"step": 2, "loss": 4.0}\n')
    assert [row.number for row in numbered_rows(path, step=int)] == [1, 3]
    told = capsys.readouterr().err
    assert told.startswith(f"note: {path}, line 2: the row {BAD[line]}")
    assert told.count("\n") == 1
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert last_step(path)[0] == 2
    assert lead_seconds(path, 60) == 240


def test_half_a_row_at_the_end_is_no_bad_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert read_rows(path) == [{"step": 1}]
    # A whole one without its end, as an editor leaves it, counts.
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_rows(path) == [{"step": 1}, {"step": 2}]
    assert capsys.readouterr().err == ""


def test_a_file_that_is_no_record_is_named_in_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"word\n" * 1000)
    assert read_rows(path) == []
    told = capsys.readouterr().err
    assert told.count("\n") == 4
    assert told.endswith("997 more rows are bad, and left out\n")


def test_a_row_needs_its_keys() -> None:
    assert parse_row(b'{"job": "7", "at": "now"}\n', job=str, at=str) == {"job": "7", "at": "now"}
    with pytest.raises(ValueError, match="has no `at`"):
        parse_row(b'{"job": "7"}', job=str, at=str)
