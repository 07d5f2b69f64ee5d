"""The command line: help, errors and exit codes; `config show` and `config check`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.stages import load_config
from pretrain.config.suggest import did_you_mean_path
from pretrain.errors import CheckpointError, ConfigError, DataError, StoppedEarly
from tests.every_command import help_pages
from tools import cli

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text("train: {num_steps: 7}\nmodel: {memory: {}}\ndata: {datasets: [{path: x}]}")
    return path


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return " ".join(captured.err.split())


def test_show_prints_yaml_that_loads_again(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--explain"]):
        assert cli.main(["config", "show", str(config_file), "seed=3", *flags, "optimizer.lr=1e-4"]) == 0
        shown = capsys.readouterr().out
        (tmp_path / "shown.yaml").write_text(shown)
        assert load_config(tmp_path / "shown.yaml") == load_config(config_file, ["seed=3", "optimizer.lr=1e-4"])
        assert ("# Optimizer steps in all." in shown) == bool(flags)
        assert "tokens in all: 57,344" in shown


def test_show_says_how_large_initial_outputs_are(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", str(config_file)]) == 0
    shown = capsys.readouterr().out
    assert "# initialisation (paper):" in shown
    assert "feed-forward: output std 0.1265 by the paper's Eq. 25, 0.07007 of the SwiGLU" in shown
    assert "--layers 4" in shown
    assert cli.main(["config", "show", str(config_file), "--layers", "4"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"block 3: score gain 0\.\d+, sigma_s 0\.\d+, sigma_V 0\.\d+, output std measured 0\.1\d+, predicted 0\.1\d+, "
        r"of its feed-forward measured 0\.07\d+",
        shown,
    )
    for layers in (1, 3, 50):
        assert cli.main(["config", "show", str(config_file), "--layers", str(layers), "model.num_layers=6"]) == 0
        assert len(re.findall(r"memory of block \d", capsys.readouterr().out)) == min(layers, 6)
    assert cli.main(["config", "show", str(config_file), "model.memory=null"]) == 0
    assert "initialisation" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--layers", "0"], "--layers is 0"), (["--layers", "2", "model.memory=null"], "--layers has no effect")],
)
def test_show_refuses_layers_that_are_not_there(
    config_file: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in usage_error(capsys, "config", "show", str(config_file), *words)


def test_show_refuses_scores_that_no_gain_can_lift(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = "model.memory={num_keys: 1, top_k: 1, num_heads: 1, key_dim: 1}"
    message = usage_error(capsys, "config", "show", str(config_file), "--layers", "4", memory)
    assert "raise model.memory.num_keys or lower top_k" in message


def test_explain_says_why_a_key_is_missing(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", str(config_file), "--explain"]) == 0
    assert "  # decay_steps: without effect unless optimizer.schedule is wsd" in capsys.readouterr().out


def test_keys_lists_types_defaults_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "--keys"]) == 0
    shown = capsys.readouterr().out
    assert "\noptimizer.schedule: constant | cosine | wsd, default cosine\n    After warm-up:" in shown
    assert "\ndata.datasets.N.path: str, required\n" in shown
    assert "\nmodel.memory: section | null, default null\n" in shown
    assert "Only where optimizer.schedule is wsd." in shown


def test_show_needs_something_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert "config show needs the path of a configuration, or --keys" in usage_error(capsys, "config", "show")
    assert "leave a.yaml out" in usage_error(capsys, "config", "show", "a.yaml", "--keys")


def test_check_validates(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["config", "check", str(config_file), "--elsewhere"]
    assert cli.main([*check, "--ranks", "4", "parallel.tensor=2"]) == 0
    assert cli.main(check) == 0
    first, held, second = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"{config_file} can run on 4 ranks.", f"{config_file} can run.")
    assert held.startswith("Each rank holds 0.0207 GB of weights and gradients")
    assert "the run has 3 ranks" in usage_error(capsys, *check, "parallel.tensor=2", "--ranks", "3")
    assert "--ranks is 0" in usage_error(capsys, "config", "check", str(config_file), "--ranks", "0")


def test_errors_of_the_configuration_are_one_paragraph(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = usage_error(capsys, "config", "show", str(config_file), "lr=3")
    assert message == "megamem: error: override lr=3: unknown key lr: did you mean optimizer.lr?"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["confg"], ["invalid choice: 'confg'", "did you mean config?", "`megamem --help`"]),
        (["config", "shw"], ["did you mean show?", "`megamem config --help`"]),
        (["config", "show", "--explan"], ["unrecognized arguments: --explan: did you mean --explain?"]),
        (["config", "show", "a.yaml", "--keis", "a=1"], ["did you mean --keys?"]),
        (["config", "show", "a.yaml", "--optimizer.lr=3"], ["did you mean optimizer.lr=3?"]),
        (["config", "show", "a.yaml", "--optimizer.lr", "3"], ["did you mean optimizer.lr=3?"]),
        (["config", "show", "a.yaml", "--key"], ["unrecognized arguments: --key"]),
        (["config", "check"], ["the following arguments are required: CONFIG. `"]),
        (["config", "check", "a.yaml", "--ranks", "x"], ["argument --ranks: 'x' is not a whole number"]),
        ([], ["the following arguments are required: COMMAND"]),
        (["--qqqqqq"], ["the following arguments are required: COMMAND"]),
    ],
)
def test_usage_errors_name_the_nearest_word(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = usage_error(capsys, *argv)
    assert message.startswith("megamem: error: ")
    for part in parts:
        assert part in message


def test_what_the_examples_of_the_help_name_is_there() -> None:
    """Configurations and documents; runs and data sets are the reader's own, and some files another package's."""
    named = {
        path
        for page in help_pages(cli.build_parser((), ()))
        for path in re.findall(r"(?:configs|docs|tests)/[\w./*-]+", page)
    }
    assert len(named) > 5
    for path in named - {"docs/*.txt"}:
        assert list(REPOSITORY.glob(path.rstrip("."))), path


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "config" in shown
    assert "Exit codes" in shown
    assert cli.main(["config", "show", "--help"]) == 0
    assert "key=value" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("megamem ")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a"), 2, "megamem: error: a\n"),
        (DataError("b"), 3, "megamem: error: b\n"),
        (CheckpointError("c"), 4, "megamem: error: c\n"),
        (StoppedEarly("d"), 75, "megamem: d\n"),
        (KeyboardInterrupt(), 130, "megamem: interrupted\n"),
        (SystemExit(5), 5, ""),
        (RuntimeError("broken"), 1, "Traceback (most recent call last):"),
        (BrokenPipeError("some other pipe"), 1, "Traceback (most recent call last):"),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    def build_parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        parser.set_defaults(func=fail)
        return parser

    monkeypatch.setattr(cli, "build_parser", build_parser)
    assert cli.main([]) == code
    shown: Any = capsys.readouterr().err
    assert shown.startswith(text)
    assert ("Traceback" in shown) == (code == 1)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("train", "a.yaml", "--nproc", "two"), "argument --nproc: 'two' is not a whole number"),
        (("train", "a.yaml", "--nproc", "0"), "0 ranks cannot be started: give 1 or more"),
        (("config", "ffn-width", "a.yaml", "--target", "big"), "argument --target: 'big' is not a number"),
    ],
)
def test_a_number_that_is_none_is_told_in_words(
    argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in usage_error(capsys, *argv)


def test_a_mistyped_run_gets_the_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "dense"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "gone").symlink_to("away")
    for command in (["status"], ["report"], ["plot"], ["eval"], ["checkpoint", "inspect"]):
        assert cli.main([*command, "runs/quikstart"]) != 0
        assert ": did you mean runs/quickstart?" in " ".join(capsys.readouterr().err.split()), command
        for other in ("xyz", "tiny", "gone"):
            assert cli.main([*command, f"runs/{other}"]) != 0
            assert "did you mean" not in capsys.readouterr().err, (command, other)


def test_the_part_of_a_path_that_is_mistyped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/stdlib").mkdir(parents=True)
    Path("data/stdlib/file").touch()
    for mistyped, meant in (
        ("data/sdtlib", ": did you mean data/stdlib?"),
        ("dat/stdlib", ": did you mean data/stdlib?"),
        ("dat/stdlib/file", ": did you mean data/stdlib/file?"),
        # Both parts are mistyped: the first is mended.
        ("dat/sdtlib", ": did you mean data?"),
        (str(tmp_path / "dat" / "stdlib"), f": did you mean {tmp_path}/data/stdlib?"),
        ("data/stdlib/file/in", "."),
        ("data/web", "."),
        ("elsewhere/stdlib", "."),
    ):
        assert did_you_mean_path(Path(mistyped)) == meant, mistyped


def test_show_imports_no_torch() -> None:
    code = (
        "import sys; from tools.cli import main; assert main(['config', 'show', 'configs/quickstart.yaml']) == 0; "
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_help_imports_no_torch() -> None:
    code = "import sys; from tools.cli import main; main(['--help']); sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(
        [sys.executable, "-m", "tools.cli", "config", "show", "--keys"],
        cwd=REPOSITORY,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (cli.EXIT_BROKEN_PIPE, b"")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["train", "~/a.yaml"], "config", "/home/me/a.yaml"),
        (["train", "a.yaml", "--run-dir=~/runs/x"], "run_dir", Path("/home/me/runs/x")),
        (["eval", "~/runs/x", "--data", "~/data/b"], "data", ["/home/me/data/b"]),
        (["data", "prepare", "~/texts", "--output", "out", "--tokenizer=~/t.json"], "tokenizer", "/home/me/t.json"),
        (["data", "prepare", "~/texts", "--output", "out"], "inputs", ["/home/me/texts"]),
        (["generate", "runs/x", "--prompt", "~/a"], "prompt", "~/a"),
        (["eval", "runs/a~b"], "run", Path("runs/a~b")),
    ],
)
def test_a_tilde_in_quotes_is_the_home_folder_where_a_path_is_given(
    monkeypatch: pytest.MonkeyPatch, words: list[str], name: str, value: object
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert getattr(cli.build_parser().parse_args(words), name) == value


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ((), ("tables: 2 + 4 + 12 = 18", "other weights: 2 + 4 + 12 = 18")),
        (
            ("optimizer.tables=row_wise", "optimizer.matrices=muon"),
            ("tables: 2 + 4 + 0.25 = 6.25", "hidden matrices: 2 + 4 + 8 = 14", "other weights: 2 + 4 + 12 = 18"),
        ),
        (
            ("optimizer.tables=row_wise", "optimizer.table_gradient_dtype=bf16"),
            ("tables: 2 + 2 + 0.25 = 4.25", "other weights: 2 + 4 + 12 = 18"),
        ),
        (
            ("optimizer.tables=row_wise", "optimizer.table_gradients=rows", "optimizer.value_weight_decay=0"),
            ("tables: 2 + 0 + 0.25 = 2.25", "other weights: 2 + 4 + 12 = 18"),
        ),
        (
            ("model.memory=null", "train.precision=fp32"),
            ("other weights: 4 + 4 + 8 = 16",),
        ),
    ],
    ids=["adamw", "row_wise and muon", "bf16 gradients", "rows", "dense"],
)
def test_bytes_per_parameter_follow_the_optimizer(
    overrides: tuple[str, ...], lines: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 32 numbers have 8 bytes of state."""
    sizes = ("train.precision=bf16", "model.memory.value_dim=32") if "model.memory=null" not in overrides else ()
    assert cli.main(["config", "show", str(REPOSITORY / "configs" / "quickstart.yaml"), *sizes, *overrides]) == 0
    shown = capsys.readouterr().out.partition("# bytes per parameter, of weight + gradient + optimizer's state:\n")[2]
    assert tuple(line.removeprefix("#   ") for line in shown.partition("\n\n")[0].splitlines()) == lines


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("train", "--nproc 2"),
        ("config check", "--ranks 2"),
        ("plan", "--gpus 8 --gpu h100-80g"),
        ("dryrun", "--world-size 8"),
    ],
)
def test_overrides_stand_on_either_side_of_options(command: str, option: str) -> None:
    args = cli.build_parser().parse_args([*command.split(), "a.yaml", "seed=3", *option.split(), "optimizer.lr=1e-4"])
    words = [*getattr(args, "configs", getattr(args, "words", ())), *args.overrides]
    assert [word for word in words if "=" in word] == ["seed=3", "optimizer.lr=1e-4"]
