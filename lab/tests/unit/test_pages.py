"""Reports are written into the part of a page that is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.pages import Page, wrapped
from pretrain.errors import ConfigError


def test_a_report_is_filled_between_its_marks(tmp_path: Path) -> None:
    page = Page(tmp_path / "docs" / "page.md", "comparison")
    begin, end = page.marks
    page.check()
    page.write("first\n", "<svg/>")
    assert page.path.read_text() == f"# Comparison\n\n{begin}\nfirst\n{end}\n"
    page.path.write_text(f"before\n{begin}\nfirst\n{end}\nafter\n")
    page.check()
    page.write("second\n", "<svg></svg>", search="<svg>other</svg>")
    assert page.path.read_text() == f"before\n{begin}\nsecond\n{end}\nafter\n"
    assert page.path.with_suffix(".svg").read_text() == "<svg></svg>"
    assert (page.path.parent / "page_search.svg").read_text() == "<svg>other</svg>"


def test_a_page_of_somebody_else_is_not_written_over(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("mine <!-- comparison --> <!-- end of comparison -->")
    Page(page, "comparison").check()
    with pytest.raises(ConfigError, match="no lines <!-- recall --> and <!-- end of recall -->"):
        Page(page, "recall").check()
    with pytest.raises(ConfigError, match="markdown"):
        Page(tmp_path / "plot.svg", "recall").check()


def test_prose_alone_is_wrapped() -> None:
    row, command = f"| {'a ' * 80}|", f"megamem {'b ' * 80}"
    prose = "word " * 30 + "last"
    text = wrapped(f"{prose}\n\n{row}\n```\n{command}\n```\nshort\n")
    assert text == f"{'word ' * 23}word\n{'word ' * 6}last\n\n{row}\n```\n{command}\n```\nshort\n"
