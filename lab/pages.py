"""Reports that are written into pages which say more than the report."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from parallel.machine.refusals import check_can_write
from pretrain.errors import ConfigError

_LINE = 120
"""Characters of a line of prose in `docs/`."""


@dataclass(frozen=True)
class Page:
    """A markdown file with a part that is written anew, between two marks, and a plot beside it.

    Attributes:
        path: path of the file, which may not be there yet.
        part: the name of the part.
    """

    path: Path
    part: str

    @property
    def plot(self) -> Path:
        """The plot's file."""
        return self.path.with_suffix(".svg")

    def plot_called(self, name: str) -> Path:
        """The file of a further plot."""
        return self.path.with_name(f"{self.path.stem}_{name}.svg")

    @property
    def marks(self) -> tuple[str, str]:
        """Lines before and after the part."""
        return f"<!-- {self.part} -->", f"<!-- end of {self.part} -->"

    def check(self) -> None:
        """Refuse to write over a page that is none of ours.

        Raises:
            ConfigError: the file is there and lacks the marks.
            OSError: the page could not be written.
        """
        begin, end = self.marks
        if self.path.suffix != ".md":
            raise ConfigError(f"--report is {self.path}: name a markdown file (.md); the plot goes beside it")
        if self.path.exists() and end not in self.path.read_text(encoding="utf-8").partition(begin)[2]:
            raise ConfigError(
                f"--report is {self.path}, which is there and has no lines {begin} and {end} to write between: put "
                "them in, or name another file"
            )
        for file in (self.path, self.plot):
            check_can_write(file)

    def write(self, text: str, svg: str, **others: str) -> None:
        """Put the text between the marks (or make a page of it) and the plot beside the page.

        Args:
            text: the part's markdown.
            svg: the plot.
            others: further plots, by the names of `plot_called`.
        """
        begin, end = self.marks
        empty = f"# {self.part.capitalize()}\n\n{begin}\n{end}\n"
        before, _, rest = (self.path.read_text(encoding="utf-8") if self.path.exists() else empty).partition(begin)
        after = rest.partition(end)[2]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.plot.write_text(svg, encoding="utf-8")
        for name, other in others.items():
            self.plot_called(name).write_text(other, encoding="utf-8")
        self.path.write_text(f"{before}{begin}\n{wrapped(text)}{end}{after}", encoding="utf-8")


def wrapped(markdown: str) -> str:
    """Text with every line of prose wrapped at 120 characters; rows of tables and blocks of code stay as they are."""
    lines: list[str] = []
    in_code = False
    for line in markdown.split("\n"):
        fence = line.startswith("```")
        in_code ^= fence
        is_prose = len(line) > _LINE and not (in_code or fence or line.startswith("|"))
        lines += textwrap.wrap(line, _LINE, break_long_words=False, break_on_hyphens=False) if is_prose else [line]
    return "\n".join(lines)
