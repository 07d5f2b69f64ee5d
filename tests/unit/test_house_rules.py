"""Rules of the house that the source itself can be asked about."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from operator import itemgetter
from pathlib import Path

import pytest

from megamem.families.registry import FAMILIES

REPOSITORY = Path(__file__).parents[2]
PYPROJECT = REPOSITORY / "pyproject.toml"
PACKAGES = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["root_packages"]

CONFIG_FILES = (
    "megamem/config/model.py",
    "megamem/config/memory.py",
    "megamem/placement/sharing.py",
    "megamem/residual_streams/config.py",
    "megamem/retrieval/config.py",
    *(f"megamem/families/{kind}/config.py" for kind in FAMILIES),
    "pretrain/config/optimizer.py",
    "pretrain/config/schema.py",
    "slurm/profile.py",
)


def source_files(package: str) -> list[Path]:
    """Files below a folder, without the tests in it, and without what an installation has built there."""
    folder = REPOSITORY / package
    others = {"tests", "build"}
    files = sorted(path for path in folder.rglob("*.py") if others.isdisjoint(path.relative_to(folder).parts))
    assert files, f"{package} is not there: what holds of its files would hold of none"
    return files


def test_every_package_is_there_and_no_other() -> None:
    folders = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    assert folders - {"tests"} == set(PACKAGES)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def rooms() -> Iterator[str]:
    """Modules and packages that the contracts of imports name."""
    for contract in tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]:
        for container in contract.get("containers", ()):
            yield from (f"{container}.{name.strip()}" for layer in contract["layers"] for name in layer.split(":"))
        yield from contract.get("protected_modules", ())
        if contract.get("forbidden_modules", ["tests"]) != ["tests"]:
            yield from (*contract["source_modules"], *contract["forbidden_modules"])


SOUND = {
    "megamem.sound": "import kernels",
    "tools.sound": "from pretrain import run",
    "pretrain.train.sound": "import pretrain.engine",
}
WRONG = {
    "megamem.inner": ("def f():\n    import pretrain", "megamem.inner -> pretrain (l.2)"),
    "kernels.typed": (
        "if TYPE_CHECKING:\n    from megamem import bank",
        "kernels.typed -> megamem (l.2)",
    ),
    "pretrain.tested": ("import tests.unit", "pretrain.tested -> tests (l.1)"),
    "pretrain.config.upward": ("import pretrain.train", "pretrain.config.upward -> pretrain.train (l.1)"),
    "tools.curious": ("import lab.studies", "tools.curious -> lab.studies"),
    "lab.bench.curious": ("import lab.studies", "lab.bench.curious -> lab.studies"),
    "pretrain.checkpoint.knowing": (
        "import pretrain.engine.build",
        "pretrain.checkpoint.knowing -> pretrain.engine.build",
    ),
    "pretrain.run.asking": ("import pretrain.planning.seconds", "pretrain.run.asking -> pretrain.planning.seconds"),
    "megamem.retrieval.knowing": ("import megamem.families", "megamem.retrieval.knowing -> megamem.families"),
}
"""Modules with a line that no contract allows, and a part of what is printed."""


def test_the_contracts_of_imports_find_the_wrong_ones(tmp_path: Path) -> None:
    """`make lint` holds them on the packages themselves."""
    shutil.copy(PYPROJECT, tmp_path)
    for name in (*PACKAGES, *rooms()):
        folder = tmp_path / name.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for package in (folder, *folder.parents):
            if package.is_relative_to(tmp_path) and package != tmp_path:
                (package / "__init__.py").touch()
    add_modules(tmp_path, SOUND)
    code, printed = contracts_of(tmp_path)
    assert code == 0, printed
    add_modules(tmp_path, {name: line for name, (line, _) in WRONG.items()})
    code, printed = contracts_of(tmp_path)
    assert code == 1
    for _, found in WRONG.values():
        assert found in printed
    assert "sound" not in printed


def add_modules(folder: Path, lines: Mapping[str, str]) -> None:
    for name, line in lines.items():
        (folder / f"{name.replace('.', '/')}.py").write_text(line + "\n", encoding="utf-8")


def contracts_of(folder: Path) -> tuple[int, str]:
    """Exit code and words of import-linter in a folder."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def test_every_room_of_pretrain_is_in_the_contract() -> None:
    folder = REPOSITORY / "pretrain"
    there = {path.parent.name if path.name == "__init__.py" else path.stem for path in folder.glob("*/__init__.py")}
    there |= {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {name.split(".")[1] for name in rooms() if name.startswith("pretrain.")} == there


def classes_by_name(files: Iterable[Path]) -> dict[str, list[str]]:
    """Files that define a class of a name, for names that other files may import."""
    found: dict[str, list[str]] = {}
    for file in files:
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file.relative_to(REPOSITORY)))
    return found


def test_one_name_stands_for_one_class() -> None:
    """Exported code, which stands alone in folders of models, has names of its own."""
    files = [file for package in PACKAGES for file in source_files(package) if file.parent.name != "remote_code"]
    twice = {name: places for name, places in classes_by_name(files).items() if len(places) > 1}
    assert not twice, twice


def test_a_name_of_two_classes_is_found() -> None:
    file = REPOSITORY / "pretrain" / "state.py"
    assert classes_by_name([file, file])["RunState"] == ["pretrain/state.py"] * 2


def config_classes() -> list[ast.ClassDef]:
    return [node for file in CONFIG_FILES for node in parse(REPOSITORY / file).body if is_config_class(node)]  # type: ignore[misc]


def is_config_class(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Entry"))


def documented_fields(definition: ast.ClassDef) -> dict[str, bool]:
    """Each field of a class, and whether a docstring follows it."""
    fields = {}
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields[statement.target.id] = (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
                and bool(following.value.value.strip())
            )
    return fields


def imported_modules(path: Path, modules: set[str]) -> Iterator[str]:
    """Modules, of these, that a file imports: at its top, within functions and for type checkers alone."""
    for node in ast.walk(parse(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield from {name, name.rpartition(".")[0]} & modules


def a_circle(folder: Path, packages: list[str]) -> list[str]:
    """Modules that import one another in a circle; none if there is no such circle."""
    paths = {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for package in packages
        for path in (folder / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    sorter = TopologicalSorter(
        {name: set(imported_modules(path, paths.keys() - {name})) for name, path in paths.items()}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert not a_circle(REPOSITORY, PACKAGES)


@pytest.mark.parametrize(
    "form", ["from a.first import f", "def f():\n    import a.first", "if TYPE_CHECKING:\n    import a.first"]
)
def test_a_circle_is_found(tmp_path: Path, form: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.py").write_text("from a import second")
    (tmp_path / "a" / "second.py").write_text("import torch")
    assert not a_circle(tmp_path, ["a"])
    (tmp_path / "a" / "second.py").write_text(form)
    assert set(a_circle(tmp_path, ["a"])) == {"a.first", "a.second"}


def test_the_config_classes_are_found() -> None:
    names = {definition.name for definition in config_classes()}
    assert {"MemoryConfig", "ModelConfig", "RunConfig", "DatasetEntry"} <= names


@pytest.mark.parametrize("definition", config_classes(), ids=lambda definition: definition.name)
def test_every_config_field_has_a_docstring(definition: ast.ClassDef) -> None:
    missing = [name for name, has_docstring in documented_fields(definition).items() if not has_docstring]
    assert not missing


def names_of_families(tree: ast.AST) -> list[tuple[str, int]]:
    """Kinds as text, and imports of one family's modules, with the line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in FAMILIES:
            found.append((str(node.value), node.lineno))
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [(name, node.lineno) for name in modules if name.split(".")[2:3] and name.split(".")[2] in FAMILIES]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_code_outside_of_the_families_names_one(package: str) -> None:
    files = [path for path in source_files(package) if "families" not in path.parts]
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} {name}"
        for path in files
        for name, line in names_of_families(parse(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_name_of_a_family_is_found() -> None:
    text = "from megamem.families.pkm.layer import X\nimport megamem.families.registry\nif kind == 'peer':\n    pass\n"
    assert names_of_families(ast.parse(text)) == [("megamem.families.pkm.layer", 1), ("peer", 3)]


IMPORT_TIME_CALLS = (
    "os.environ",
    "os.putenv",
    "os.chdir",
    "logging.basicConfig",
    "logging.disable",
    "warnings.filterwarnings",
    "warnings.simplefilter",
    "signal.signal",
    "torch.cuda",
    "torch.distributed",
    "torch.manual_seed",
    "torch.set_",
    "torch.backends",
    "multiprocessing.set_start_method",
    "print",
)


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that an import evaluates: all but the bodies of functions and of `if __name__ == "__main__"`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        # Annotations are not evaluated: every file has `from __future__ import annotations`.
        if isinstance(node, ast.AnnAssign):
            yield from run_at_import(ast.Module([ast.Expr(node.value)] if node.value else [], []))
            continue
        yield node
        yield from run_at_import(node)


def effects_at_import(tree: ast.Module) -> list[tuple[str, int]]:
    """Calls, and writes into the environment, that change or ask the process when a file is imported."""
    found = []
    for node in run_at_import(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
        else:
            continue
        if name.startswith(IMPORT_TIME_CALLS) and (not name.startswith("print") or name == "print"):
            found.append((name, node.lineno))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_happens_at_import(package: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} {name}"
        for path in source_files(package)
        for name, line in effects_at_import(parse(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_an_effect_at_import_is_found() -> None:
    text = (
        "import os\nos.environ['A'] = '1'\nHAS_GPU: bool = torch.cuda.is_available()\n"
        "def f():\n    print('fine')\nclass C:\n    seed = torch.manual_seed(1)\n"
    )
    found = effects_at_import(ast.parse(text))
    assert found == [("os.environ['A']", 2), ("torch.cuda.is_available", 3), ("torch.manual_seed", 7)]


QUESTIONS = "of|what|which|whose|where|how|who|when|why|whether"
BEGINS_A_FRAGMENT = re.compile(rf"\s*({QUESTIONS})\b.*", re.IGNORECASE)
GOES_ON = re.compile(r"\s*(the same|those|that of)\b.*", re.IGNORECASE)
PLACES = "(after|at|by|for|from|in|of|on|over|to|with) (what|which|whom|whose)"
NO_SUBJECTS = f"{QUESTIONS}|{PLACES}|that|those|the same|see|as|it|they"
BEGINS_NO_ENTRY = re.compile(rf"\s*({NO_SUBJECTS})\b.*", re.IGNORECASE)
EVERYWHERE = "on (every rank|all ranks): "
BEGINS_NO_CAUSE = re.compile(
    rf"\s*({EVERYWHERE})?({NO_SUBJECTS}|if|there|for|with|naming|saying|its|one)\b.*", re.IGNORECASE
)

SECTION = re.compile(
    r"^(?P<indent> *)(?P<name>Args|Attributes|Returns|Raises):\n(?P<entries>(?:(?P=indent) {4}.*\n|\s*\n)+)",
    re.MULTILINE,
)
NAMED_ENTRY = re.compile(r"^[\w.*`]+(?:, [\w.*`]+)*:\s+(?P<text>.*)", re.MULTILINE)


@dataclass(frozen=True)
class Docstring:
    """Text that stands first in a module, class or function, or follows an assignment.

    Attributes:
        line: number of its first line, from 1.
        is_of_field: the text follows an assignment.
    """

    text: str
    line: int
    is_of_field: bool


def docstrings(tree: ast.Module) -> Iterator[Docstring]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                text = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(before, ast.Assign | ast.AnnAssign | None):
                    yield Docstring(str(text.value), text.lineno, before is not None)


def begins(pattern: re.Pattern[str], found: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Lines that begin with some words, out of texts with the number of their first line."""
    matches = [(pattern.match(text), line) for text, line in found]
    return [(match[0].strip(), line) for match, line in matches if match is not None]


def fragments(tree: ast.Module) -> list[tuple[str, int]]:
    """First lines of docstrings that begin in the middle of a thought, with the line."""
    return begins(BEGINS_A_FRAGMENT, ((each.text, each.line) for each in docstrings(tree)))


def going_on(tree: ast.Module) -> list[tuple[str, int]]:
    """First lines of docstrings that say which of a thing that stands elsewhere, with the line."""
    return begins(GOES_ON, ((each.text, each.line) for each in docstrings(tree)))


def entries(text: str, *, of_errors: bool) -> Iterator[tuple[str, int]]:
    """Texts behind the names in sections of a docstring, and the first one of a result, with the lines before each.

    Args:
        of_errors: read the section of what is raised; else the other ones.
    """
    text += "\n"
    for section in SECTION.finditer(text):
        if (section["name"] == "Raises") != of_errors:
            continue
        before, within = text.count("\n", 0, section.start("entries")), textwrap.dedent(section["entries"])
        found = list(NAMED_ENTRY.finditer(within))
        yield from ((each["text"], before + within.count("\n", 0, each.start("text"))) for each in found)
        if not found or found[0].start():
            yield within, before


def entry_fragments(tree: ast.Module) -> list[tuple[str, int]]:
    """Entries of sections, and docstrings of fields, that do not begin with what they are about, with the line."""
    found: list[tuple[str, int]] = []
    causes: list[tuple[str, int]] = []
    for each in docstrings(tree):
        found += [(each.text, each.line)] if each.is_of_field else []
        found += [(text, each.line + line) for text, line in entries(each.text, of_errors=False)]
        causes += [(text, each.line + line) for text, line in entries(each.text, of_errors=True)]
    return begins(BEGINS_NO_ENTRY, found) + begins(BEGINS_NO_CAUSE, causes)


def wrong_lines(package: str, find: Callable[[ast.Module], list[tuple[str, int]]]) -> str:
    """Lines that a rule finds in the files of a package, each with its place."""
    return "\n".join(
        f"{path.relative_to(REPOSITORY)}:{line} {text}"
        for path in source_files(package)
        for text, line in find(parse(path))
    )


@pytest.mark.parametrize("package", [*PACKAGES, "tests", "lab/tests"])
def test_first_lines_of_docstrings_stand_alone(package: str) -> None:
    wrong = wrong_lines(package, fragments)
    assert not wrong, wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_first_lines_of_docstrings_do_not_go_on_from_elsewhere(package: str) -> None:
    """Tests may: `The same samples in more portions.` is what one expects, beside what it is given."""
    wrong = wrong_lines(package, going_on)
    assert not wrong, wrong


@pytest.mark.parametrize("package", [*PACKAGES, "tests", "lab/tests"])
def test_entries_and_docstrings_of_fields_stand_alone(package: str) -> None:
    wrong = wrong_lines(package, entry_fragments)
    assert not wrong, wrong


def test_a_first_line_that_does_not_stand_alone_is_found() -> None:
    text = (
        '"""What it does.\n\nMore."""\nA = 1\n"""Of the module."""\n'
        'class C:\n    """A class."""\n    b: int\n    """Whether it is."""\n'
        'def f():\n    """Offset of a row."""\n    "Of no docstring" in g()\n    """How it goes on."""\n'
    )
    assert fragments(ast.parse(text)) == [("What it does.", 1), ("Of the module.", 5), ("Whether it is.", 9)]


def test_a_first_line_that_goes_on_from_elsewhere_is_found() -> None:
    text = (
        '"""The same in C++.\n\nThose are not first."""\n'
        'class C:\n    """That of the\n    rows."""\n    b: int\n    """those of it"""\n'
        'def f():\n    """The samest of all, that of it."""\n'
    )
    assert going_on(ast.parse(text)) == [("The same in C++.", 1), ("That of the", 5), ("those of it", 8)]


def test_an_entry_that_does_not_stand_alone_is_found() -> None:
    text = (
        'class C:\n    """A class. See `g`.\n\n    Attributes:\n        a: number of it.\n        b, c: Those of it: of\n'
        '            that: see it.\n        d:\n            as it is\n\n        e: in which it is."""\n'
        '    f: int\n    """See `g`.\n\n    They stay."""\n    h: int\n    """Seed."""\n'
        'def k():\n    """\n    Args:\n        *l: whichever; none: of nothing.\n        **m: It is.\n\n    Returns:\n'
        "        The same as `k`,\n        of whom: some.\n        n: which it is.\n\n    Raises:\n        E: it is none.\n"
        "        a.F, G: on all ranks: there is none.\n        H: on every rank: the file: it is none.\n"
        "        I: for another one.\n        J: none: naming it.\n        K:\n            naming it.\n"
        '    """\n'
    )
    assert sorted(entry_fragments(ast.parse(text)), key=itemgetter(1)) == [
        ("Those of it: of", 6),
        ("as it is", 9),
        ("in which it is.", 11),
        ("See `g`.", 13),
        ("It is.", 22),
        ("The same as `k`,", 25),
        ("which it is.", 27),
        ("it is none.", 30),
        ("on all ranks: there is none.", 31),
        ("for another one.", 33),
        ("naming it.", 36),
    ]
