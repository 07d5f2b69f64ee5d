"""Record of the functions that each test runs, made once and kept; the tests that are asked about a mutant."""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage

_FILE = "reach.json"
# A test that takes no longer may have been served by a fixture.
_SHORT_S = 0.1


@dataclass(frozen=True)
class Reach:
    """Functions that each test ran.

    Attributes:
        tests: by "path::function", the tests that ran it, and how many of its lines.
        seconds: time that each test took.
    """

    tests: dict[str, dict[str, int]]
    seconds: dict[str, float]

    def renewed_by(self, newer: Reach) -> Reach:
        """This record, with that of the test files in `newer` in place of what was known of them."""
        files = {test.partition("::")[0] for test in newer.seconds}

        def others(tests: Iterable[str]) -> set[str]:
            return {test for test in tests if test.partition("::")[0] not in files}

        tests = {}
        for key in self.tests.keys() | newer.tests.keys():
            known = self.tests.get(key, {})
            tests[key] = {test: known[test] for test in others(known)} | newer.tests.get(key, {})
        seconds = {test: self.seconds[test] for test in others(self.seconds)} | newer.seconds
        return Reach({key: found for key, found in tests.items() if found}, seconds)

    def of(self, path: str, function: str) -> dict[str, int]:
        """The tests that run a function; of code outside of functions those of its whole file, and where nothing was
        seen of that, all.
        """
        known = self.tests.get(f"{path}::{function}")
        if known is None:
            inside = f"{path}::{function}." if function else f"{path}::"
            known = {test: 0 for key, tests in self.tests.items() if key.startswith(inside) for test in tests}
        if not known:
            return self.of(path, function.rpartition(".")[0]) if function else dict.fromkeys(self.seconds, 0)
        return known

    def affordable(self, tests: Mapping[str, int], budget_s: float) -> list[str]:
        """The cheapest tests for half of what may be spent; then of every file the test that runs most of the function,
        every file's second and so on.

        A test that runs most lines of a function sees its rare branches; of equal ones the cheapest is taken.
        """
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: (-tests[test], self._cost_s(test), test)):
            by_file[test.partition("::")[0]].append(test)
        chosen, spent_s = [], 0.0
        for test in sorted(tests, key=lambda test: (self._cost_s(test), test)):
            if spent_s + self._cost_s(test) > budget_s / 2:
                break
            chosen.append(test)
            spent_s += self._cost_s(test)
        taken = set(chosen)
        for one_per_file in itertools.zip_longest(*by_file.values()):
            for test in sorted(
                (test for test in one_per_file if test is not None and test not in taken), key=self._cost_s
            ):
                if not chosen or spent_s + self._cost_s(test) <= budget_s:
                    chosen.append(test)
                    spent_s += self._cost_s(test)
        # The cheap ones may answer first; pytest runs a file's tests together. A module's fixture was seen in the
        # first test that asked for it, which took longest: with it, the short ones of the same file are asked too.
        of_file_s = {file: min(map(self._cost_s, of_file)) for file, of_file in by_file.items()}
        files = {file for file, of_file in by_file.items() if max(of_file, key=self._cost_s) in chosen}
        served = [test for test in self.seconds if test.partition("::")[0] in files and self._cost_s(test) < _SHORT_S]
        return sorted(
            {*chosen, *served},
            key=lambda test: (of_file_s[test.partition("::")[0]], test.partition("::")[0], self._cost_s(test), test),
        )

    def _cost_s(self, test: str) -> float:
        return self.seconds.get(test, 0.0)


def record(root: Path, folder: Path, tests: Sequence[str] = ()) -> None:
    """Run tests once, traced, and keep what they ran in `folder`.

    Args:
        root: root of the repository.
        folder: folder in which it is kept.
        tests: files or tests whose record is renewed, beside what is known of the others; none: the whole suite.

    Raises:
        SystemExit: a test failed; what catches a mistake has to pass without one.
    """
    known = load(folder) if tests else None
    raw = folder / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.mutants.reach_plugin",
        "-p",
        "no:cacheprovider",
        *("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"),
        *(tests or ("tests", "lab/tests")),
    ]
    code = subprocess.run(command, cwd=root, env={**os.environ, "MEGAMEM_REACH": str(raw)}).returncode
    if code != 0:
        raise SystemExit("make mutants: tests fail without any mistake in the product: mend that first")
    found = collected(root, raw)
    if known is not None:
        found = known.renewed_by(found)
    (folder / _FILE).write_text(json.dumps(asdict(found)), encoding="utf-8")


def load(folder: Path) -> Reach | None:
    """Read the record that `record` has kept, if it has."""
    path = folder / _FILE
    return Reach(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def collected(root: Path, raw: Path) -> Reach:
    """Read what the plugin has left in a folder, by function."""
    lines = coverage.Coverage(data_file=str(raw / "lines"), config_file=False)
    # Combining once more would forget it. (What a killed rank left half written stays where it is.)
    if (raw / "lines").exists():
        lines.load()
    else:
        lines.combine()
    data = lines.get_data()
    tests: dict[str, Counter[str]] = defaultdict(Counter)
    for file in data.measured_files():
        path = Path(file)
        if path.suffix != ".py" or not path.is_relative_to(root):
            continue
        spans = _functions(path)
        for line, contexts in data.contexts_by_lineno(file).items():
            for function in {name for name, first, last in spans if first <= line <= last}:
                tests[f"{path.relative_to(root)}::{function}"].update(set(contexts) - {""})
    seconds: dict[str, float] = {}
    for part in raw.glob("seconds.*.json"):
        seconds |= json.loads(part.read_text(encoding="utf-8"))
    return Reach({key: dict(found) for key, found in tests.items() if found}, seconds)


def _functions(path: Path) -> list[tuple[str, int, int]]:
    """(dotted name, first line of the body, last line) of every function; nested ones count for those around them too."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found.append((name, child.body[0].lineno, child.end_lineno or child.lineno))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found
