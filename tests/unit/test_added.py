"""Commands of other distributions, and what `megamem` says where there are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from tools.cli import build_parser, main
from tools.common import added

ALONE = partial(build_parser, (), ())
COMMAND = """
def add_parser(subparsers):
    parser = subparsers.add_parser("{name}", help="of somebody")
    parser.set_defaults(func=lambda args: 7)
"""


@pytest.mark.parametrize("words", [["study"], ["study", "compare", "a.yaml", "--tune", "x.yaml", "optimizer.lr=1"]])
def test_a_study_without_the_laboratory_is_told_where_it_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, ALONE) == 2
    said = capsys.readouterr().err
    assert said.startswith("megamem: error: `megamem study` is the laboratory's, which is not installed")
    assert "pip install ./lab" in said
    assert main(["study", "--help"], ALONE) == 0
    assert "pip install ./lab" in capsys.readouterr().out


@pytest.mark.parametrize(("word", "nearest"), [("gpu-check", None), ("tran", "train"), ("studdy", "study")])
def test_an_unknown_command_may_be_the_laboratorys(
    word: str, nearest: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "a.yaml"], ALONE) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (f"did you mean {nearest}?" in said) == (nearest is not None)
    assert said.endswith("The laboratory has more: `pip install ./lab`, in a checkout of megamem.")
    assert main(["train"], ALONE) == 2
    assert "laboratory" not in capsys.readouterr().err


def test_words_are_completed_without_the_laboratory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bash"], ALONE) == 0
    assert "_shtab_megamem_study" in capsys.readouterr().out


@pytest.fixture
def somebodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with three commands of which two are studies; and metadata of one that is not there."""
    folder = tmp_path / "somebodys"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "MORE = ('somebodys.zeal',)\nSTUDIES = ('somebodys.weigh', 'somebodys.by_hand')\n"
    )
    for file, name in (("zeal", "zeal"), ("weigh", "weigh"), ("by_hand", "weigh again")):
        (folder / f"{file}.py").write_text(COMMAND.format(name=name))
    (tmp_path / "broken_one.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = (
        EntryPoint("b", "somebodys:STUDIES", added.STUDIES),
        EntryPoint("a", "not_there.commands:STUDIES", added.STUDIES),
        EntryPoint("b", "somebodys:MORE", added.COMMANDS),
        EntryPoint("c", "broken_one:THEIRS", "theirs"),
    )
    monkeypatch.setattr(added, "entry_points", EntryPoints(found).select)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("somebodys", "broken_one")]:
        del sys.modules[name]


@pytest.mark.usefixtures("somebodys")
def test_other_distributions_add_commands_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert added.added_modules(added.COMMANDS) == ("somebodys.zeal",)
    assert added.added_modules(added.STUDIES) == ("somebodys.weigh", "somebodys.by_hand")
    for words in (["zeal"], ["study", "weigh"], ["weigh"], ["weigh", "again"], ["study", "weigh", "again"]):
        assert main(words) == 7, words
    parser = build_parser()
    assert parser.studies == ("weigh", "weigh again")
    assert parser.parse_args(["weigh", "again"]).study == "weigh again"
    assert "\n    weigh " not in parser.format_help()
    assert parser.format_help().index("    zeal ") < parser.format_help().index("    study ")
    assert main(["wiegh"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "did you mean weigh?" in said
    assert "laboratory" not in said


@pytest.mark.usefixtures("somebodys")
def test_a_broken_distribution_is_not_passed_over() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        added.added_modules("theirs")
