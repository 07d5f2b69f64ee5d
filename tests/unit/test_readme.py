"""The README's tree is that of the repository; what pages tell people to type, and what they link to, exists."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.commands import COMMANDS, STUDIES
from tools.cli import build_parser

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(REPOSITORY / folder / "README.md" for folder in (".", "kernels", "lab")),
    *(page for folder in ("docs", "lab/docs") for page in sorted((REPOSITORY / folder).rglob("*.md"))),
]


def tracked_files(repository: Path) -> list[str]:
    """Paths of the repository's files: tracked, or new and not ignored, so that a file is missed before it is
    committed.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [path for path in listing.splitlines() if (repository / path).is_file()]


def shown_tree(text: str) -> dict[str, str]:
    """Paths in the README's tree, folders with a slash at their end, and their annotations."""
    block = text.split("<!-- tree -->")[1].split("<!-- end of tree -->")[0]
    shown: dict[str, str] = {}
    parent = ""
    for line in block.strip().strip("`").splitlines():
        if not line.strip():
            continue
        name, _, annotation = line.strip().partition(" ")
        if line.startswith("  "):
            shown[parent + name] = annotation.strip()
        else:
            parent = name
            shown[name] = annotation.strip()
    return shown


def tree_problems(shown: set[str], files: list[str]) -> Iterator[str]:
    """Differences of the tree and the folders. A folder that is shown with a folder in it is shown with all of them."""
    folders = {"/".join(path.split("/")[:depth]) + "/" for path in files for depth in range(1, path.count("/") + 1)}
    for path in sorted(shown - folders):
        yield f"{path} is in the README's tree, but not in the repository"
    opened = {""} | {path.rsplit("/", 2)[0] + "/" for path in shown if "/" in path[:-1]}
    for path in sorted(folders - shown):
        parent = path.rstrip("/").rpartition("/")[0]
        if (parent + "/" if parent else "") in opened:
            yield f"{path} is in the repository, but not in the README's tree: add a line for it"


def commands(text: str) -> list[str]:
    """Every `megamem ...` line of the code blocks, without its comment."""
    blocks = re.findall(r"```\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("megamem ")]


def test_tree_is_the_repository() -> None:
    problems = list(tree_problems(set(shown_tree(README)), tracked_files(REPOSITORY)))
    assert not problems, "\n".join(problems)


def test_every_entry_of_the_tree_is_annotated() -> None:
    assert [path for path, annotation in shown_tree(README).items() if not annotation] == []


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ({"a/", "b/"}, None),
        ({"a/", "a/y/", "a/w/", "b/"}, None),
        ({"a/", "a/y/", "b/"}, "a/w/ is in the repository"),
        ({"a/"}, "b/ is in the repository"),
        ({"a/", "b/", "c/"}, "c/ is in the README's tree"),
        ({"a/", "b/", "top.py"}, "top.py is in the README's tree"),
    ],
)
def test_the_comparison_sees(shown: set[str], problem: str | None) -> None:
    found = list(tree_problems(shown, ["a/x.py", "a/y/z.py", "a/w/v.py", "b/u.py", "top.py"]))
    assert found == [] if problem is None else any(problem in text for text in found)


def test_there_are_commands_to_check() -> None:
    assert len(commands(README)) > 10


def commands_of_pages() -> list[str]:
    return sorted({line for page in PAGES for line in commands(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("line", commands_of_pages())
def test_command_parses(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        args = build_parser(COMMANDS, STUDIES).parse_args(shlex.split(line)[1:])
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert isinstance(args, argparse.Namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives to a page's headings: lower case, without punctuation, with a dash for each space."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_headings_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    headings = {path: anchors(page.parent / path if path else page) for path, _ in links}
    assert links or page.name not in {"architecture.md", "decisions.md"}
    assert [f"{path}#{heading}" for path, heading in links if heading not in headings[path]] == []


def test_there_are_links_to_check() -> None:
    assert len(PAGES) > 30
    assert "](docs/" in README


def test_the_front_page_is_short() -> None:
    assert len(README.splitlines()) < 200


def test_make_test_more_lists_every_file_with_a_costly_test() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\ntest-more:")[2].partition("\n\n")[0]
    assert '-k "costly or' in recipe
    folders = [REPOSITORY / "tests", REPOSITORY / "lab" / "tests"]
    files = [
        path for folder in folders for path in folder.rglob("test_*.py") if re.search(r"\bCOSTLY\b", path.read_text())
    ]
    assert len(files) > 3
    assert [
        path for path in files if path.relative_to(REPOSITORY).as_posix() not in recipe and path != Path(__file__)
    ] == []


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z]+)`", README)) | set(
        re.findall(r"^make ([a-z]+)", README, flags=re.MULTILINE)
    )
    assert {"quickstart", "test"} <= targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
