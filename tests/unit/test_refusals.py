"""Refusals are one line with the thing, the reason and the fix, from a command and from a rank alike."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import check_can_write, describe_error, naming, refusal
from parallel.processes.rank_errors import FailureKind, RankFailure
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from tests.every_command import commands_of
from tests.refused_stdout import assert_told_that_stdout_is_closed, assert_told_that_stdout_is_full
from tools import cli

REPOSITORY = Path(__file__).parents[2]
COMMANDS = sorted(commands_of(cli.build_parser((), ())))


def refused_by_system(number: int, path: Path | None) -> OSError:
    return OSError(number, os.strerror(number)) if path is None else OSError(number, os.strerror(number), str(path))


@pytest.mark.parametrize(
    ("number", "code", "fix"),
    [
        (errno.ENOSPC, 2, "free some space there"),
        (errno.EDQUOT, 2, "free some of your space"),
        (errno.EROFS, 2, "name another place"),
        (errno.EACCES, 2, "ask its owner"),
        (errno.ENAMETOOLONG, 2, "give a shorter name"),
        (errno.ENOENT, 2, "see that it is there"),
        (errno.ENOTDIR, 2, "a file stands where a folder is meant"),
        (errno.EMFILE, 2, "ulimit -n"),
        (errno.EIO, 1, "start again"),
        (errno.ESTALE, 1, "start again"),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else "",
)
def test_the_line_names_the_thing_the_reason_and_the_fix(tmp_path: Path, number: int, code: int, fix: str) -> None:
    path = tmp_path / "thing"
    error = refused_by_system(number, path)
    found = refusal(error)
    assert found is not None
    assert found.exit_code == code
    assert found.message.startswith(f"{path} ")
    assert os.strerror(number) in found.message
    assert fix in found.message
    assert ("space" in found.message) == (number in (errno.ENOSPC, errno.EDQUOT))
    failure = RankFailure.from_exception(3, error)
    assert (failure.message, failure.exit_code, failure.is_user_error) == (found.message, code, True)
    assert failure.kind is FailureKind.ERROR


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(errno.ECONNRESET, "reset"), OSError(errno.EINVAL, "bad"), OSError("words"), ValueError("x")],
    ids=str,
)
def test_other_errors_stay_defects(error: Exception) -> None:
    assert refusal(error) is None
    assert describe_error(error) == str(error)
    assert not RankFailure.from_exception(0, error).is_user_error


def test_a_permission_that_is_of_no_file_stays_a_defect() -> None:
    assert refusal(refused_by_system(errno.EPERM, None)) is None


def test_a_dangling_link_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "away")
    with pytest.raises(OSError, match=r"No such file|exists") as caught:
        (tmp_path / "link" / "file").write_text("x")
    assert f"is a link to {tmp_path / 'away'}, which is not there" in describe_error(caught.value)


def test_what_cannot_be_moved_is_told_of_where_it_was_to_go(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "away")
    with pytest.raises(NotADirectoryError) as caught:
        (tmp_path / "made").rename(tmp_path / "link")
    assert describe_error(caught.value).startswith(
        f"{tmp_path / 'link'} cannot be opened (it is a link to {tmp_path / 'away'},"
    )


@pytest.mark.parametrize("below", ["", "run"])
def test_a_run_folder_at_a_dangling_link_is_refused_as_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "away")
    folder = RunFolder(tmp_path / "link" / below)
    for see in (folder.check_writable, folder.make):
        with pytest.raises(ConfigError, match=f"it leads to {tmp_path / 'away'}, which is not there"):
            see()


def test_a_write_that_fails_is_of_the_file_that_was_open() -> None:
    with pytest.raises(OSError, match="No space") as caught:
        Path("/dev/full").write_text("x")
    assert caught.value.filename is None
    assert describe_error(caught.value).startswith("/dev/full cannot be written (No space left on device)")


def test_names_are_given_and_kept() -> None:
    with pytest.raises(OSError, match="No space") as caught, naming("mine"):
        raise refused_by_system(errno.ENOSPC, None)
    assert describe_error(caught.value).startswith("mine cannot be written")
    with pytest.raises(OSError, match="No space") as caught, naming("mine"):
        raise refused_by_system(errno.ENOSPC, Path("theirs"))
    assert describe_error(caught.value).startswith("theirs cannot be written")
    caught.value.add_note("All is well")
    assert describe_error(caught.value).endswith("or name another place. All is well")


def test_an_atomic_write_names_what_it_was_to_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 300)
    with pytest.raises(OSError, match="too long") as caught, atomic_write(path):
        pass
    assert caught.value.filename == str(path)
    assert "(File name too long): give a shorter name" in describe_error(caught.value)
    assert len(describe_error(caught.value)) < 300


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    check_can_write(tmp_path / "there")
    check_can_write(tmp_path / "new" / "folder" / "file")
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(IsADirectoryError):
        check_can_write(tmp_path)
    with pytest.raises(OSError, match="too long"):
        check_can_write(tmp_path / ("n" * 300))
    with pytest.raises(NotADirectoryError):
        check_can_write(tmp_path / "there" / "file")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_that_stdout_is_full(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_told_that_stdout_is_full(command, monkeypatch, capfd)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_that_stdout_is_closed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_told_that_stdout_is_closed(command, monkeypatch, capsys)


def test_a_closed_stdout_leaves_no_traceback_at_the_end() -> None:
    command = [sys.executable, "-m", "tools.cli", "cluster", "keys"]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&1', "sh", *command], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert ended.returncode == 2
    full = subprocess.run(
        ["sh", "-c", 'exec "$@" >/dev/full', "sh", *command], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert full.returncode == 2
    assert full.stderr.count(b"\n") == 1
