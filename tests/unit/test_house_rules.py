"""Rules of the house that the source itself can be asked about."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamem.families.registry import FAMILIES

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("kernels", "megamem", "parallel", "pretrain", "tools")
"""Each may import itself and those before it."""

CONFIG_FILES = (
    "megamem/config.py",
    "megamem/memory_config.py",
    "megamem/sharing.py",
    "megamem/retrieval/config.py",
    *(f"megamem/families/{kind}/config.py" for kind in FAMILIES),
    "pretrain/config/schema.py",
)


def source_files(package: str) -> list[Path]:
    files = sorted((REPOSITORY / package).rglob("*.py"))
    assert files, f"{package} is not there: what holds of its files would hold of none"
    return files


def test_every_package_is_there_and_no_other() -> None:
    folders = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    assert folders - {"tests"} == set(PACKAGES)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Absolute names of what a file imports, wherever in the file, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import stays in its package unless it climbs out, which the interpreter refuses.
            yield (node.module or package) if node.level == 0 else package, node.lineno


def forbidden_imports(tree: ast.AST, package: str) -> list[tuple[str, int]]:
    """Imports of a package that stands to the right of this one, or of the tests."""
    later = {*PACKAGES[PACKAGES.index(package) + 1 :], "tests"}
    return [(name, line) for name, line in imported_modules(tree, package) if name.partition(".")[0] in later]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for path in source_files(package)
        for name, line in forbidden_imports(parse(path), package)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_import_is_found() -> None:
    tree = ast.parse("import torch\ndef f():\n    from pretrain.errors import UserError\n")
    assert forbidden_imports(tree, "megamem") == [("pretrain.errors", 3)]
    assert forbidden_imports(tree, "pretrain") == []


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


def test_the_config_classes_are_found() -> None:
    names = {definition.name for definition in config_classes()}
    assert {"MemoryConfig", "ModelConfig", "RunConfig", "DatasetEntry"} <= names


@pytest.mark.parametrize("definition", config_classes(), ids=lambda definition: definition.name)
def test_every_config_field_has_a_docstring(definition: ast.ClassDef) -> None:
    missing = [name for name, has_docstring in documented_fields(definition).items() if not has_docstring]
    assert not missing


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
