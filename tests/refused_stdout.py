"""Commands whose standard output is full or closed: what each of them says."""

from __future__ import annotations

import os
import sys

import pytest

from tools import cli


def assert_told_that_stdout_is_full(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hold a command's help to the line about a disk without room."""
    kept = os.dup(1)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    try:
        with open(1, "w", closefd=False) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert cli.main([*command.split(), "--help"]) == 2
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(full)
    assert capfd.readouterr().err == (
        "megamem: error: standard output cannot be written (No space left on device): free some space there, or name "
        "another place\n"
    )


def assert_told_that_stdout_is_closed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hold a command to the line about a standard output that was closed before it began."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(command.split()) == 2
    monkeypatch.undo()
    assert capsys.readouterr().err.startswith("megamem: error: standard output is closed: ")
