"""Commands that the laboratory adds to `megamem`: their names, their words, what they say where something is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.arguments import load_configs
from lab.commands import COMMANDS, STUDIES
from tests.every_command import commands_of, help_pages
from tests.refused_stdout import assert_told_that_stdout_is_closed, assert_told_that_stdout_is_full
from tools import cli

REPOSITORY = Path(__file__).parents[3]
ADDED = sorted({*commands_of(cli.build_parser(COMMANDS, STUDIES))} - {*commands_of(cli.build_parser((), ()))})


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return " ".join(captured.err.split())


def test_the_installed_program_has_them_all() -> None:
    """By entry points, in the order of `--help`."""
    installed, listed = cli.build_parser(), cli.build_parser(COMMANDS, STUDIES)
    assert installed.studies == listed.studies
    assert [*commands_of(installed)] == [*commands_of(listed)]
    of_the_product = {*commands_of(cli.build_parser((), ()))} - {"study"}
    added = [name for name in commands_of(installed) if name not in of_the_product]
    assert added[:4] == ["data synthetic", "gpu-check", "study compare", "study fit"]
    assert added[-1] == "study bench files"
    assert len(added) > 15


@pytest.mark.parametrize("words", [["compare", "a.yaml"], ["bench", "a.yaml"], ["bench", "step", "a.yaml"]])
def test_studies_are_answered_by_their_names_alone(words: list[str]) -> None:
    parser = cli.build_parser()
    assert parser.parse_args(words) == parser.parse_args(["study", *words])
    assert f"\n    {words[0]} " not in parser.format_help()


def test_a_folder_may_be_called_as_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert usage_error(capsys, "status", "compare").startswith("megamem: error: compare: no such folder")


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(("compar", "a.yaml"), "compare"), (("benc", "step"), "bench"), (("study", "recal"), "recall")],
)
def test_the_nearest_study_is_named(words: tuple[str, ...], nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"did you mean {nearest}?" in usage_error(capsys, *words)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("study bench step", "--nproc 2"),
        ("bench step", "--rounds 1"),
        ("study bench generate", "--tokens 3"),
        ("study bench updates", "--vary seed=1,2"),
        ("study compare", "--nproc 2"),
        ("study recall", "--nproc 2"),
        ("study probe", "--nproc 2"),
    ],
)
def test_overrides_stand_on_either_side_of_a_studys_options(command: str, option: str) -> None:
    args = cli.build_parser().parse_args([*command.split(), "a.yaml", "seed=3", *option.split(), "optimizer.lr=1e-4"])
    words = [*getattr(args, "configs", getattr(args, "words", ())), *args.overrides]
    assert [word for word in words if "=" in word] == ["seed=3", "optimizer.lr=1e-4"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "a.yaml"


def test_late_overrides_of_a_benchmark_count(config_file: Path) -> None:
    config_file.write_text("model: {vocab_size: 300}\ntrain: {num_steps: 7}")
    words = ["bench", "step", str(config_file), "train.num_steps=8", "--rounds", "1", "train.num_steps=9"]
    (config,) = load_configs(cli.build_parser().parse_args(words)).values()
    assert config.train.num_steps == 9


def test_what_the_examples_of_the_help_name_is_there() -> None:
    """Configurations and documents of ours."""
    pages = [page for page in help_pages(cli.build_parser(COMMANDS, STUDIES)) if "study" in page or "gpu-check" in page]
    named = {path for page in pages for path in re.findall(r"(?:lab/)?(?:configs|docs|tests)/[\w./*-]+", page)}
    assert len(named) > 5
    for path in named - {"lab/docs/comparison.md", "docs/*.txt"}:
        assert list(REPOSITORY.glob(path.rstrip("."))), path


@pytest.mark.parametrize("command", ADDED)
def test_every_command_says_that_stdout_is_full(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_told_that_stdout_is_full(command, monkeypatch, capfd)


@pytest.mark.parametrize("command", ADDED)
def test_every_command_says_that_stdout_is_closed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_told_that_stdout_is_closed(command, monkeypatch, capsys)


def test_their_help_imports_no_torch() -> None:
    code = (
        "import sys; from lab.commands import COMMANDS, STUDIES; from tools.cli import build_parser; "
        "build_parser(COMMANDS, STUDIES).format_help(); sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_shells_complete_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "_shtab_megamem_study_compare" in script
    assert "_shtab_megamem_data_synthetic" in script
