"""Trying mutants: a copy of the repository per worker, a mistake in it, and the tests that run the function with the
mistake.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.operators import Mutant, mutated_source
from tests.mutants.reach import Reach


@dataclass(frozen=True)
class Trial:
    """Outcome of a mutant.

    Attributes:
        mutant: the one tried.
        outcome: caught, timeout (which counts as caught), survived, or broken (cannot be imported, and does not count).
        by: the test that failed.
        num_tests: number of tests that were asked.
        seconds: time that they took.
    """

    mutant: Mutant
    outcome: str
    by: str
    num_tests: int
    seconds: float

    @property
    def counts(self) -> bool:
        return self.outcome != "broken"

    @property
    def is_caught(self) -> bool:
        return self.outcome in ("caught", "timeout")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Trial:
        fields = json.loads(text)
        return cls(**{**fields, "mutant": Mutant(**fields["mutant"])})


class Worker:
    """Tries one mutant after the other in its own copy of the repository."""

    def __init__(self, root: Path, folder: Path, reach: Reach, *, budget_s: float) -> None:
        """Copy the repository and start the process that tests are forked from.

        Args:
            root: root of the repository.
            folder: folder of the copy; made anew.
            reach: record of which tests run what.
            budget_s: most that the tests of one mutant may cost together, by their recorded seconds.
        """
        self._root = root
        self._folder = folder
        self._reach = reach
        self._budget_s = budget_s
        self._untrusted: set[str] = set()
        self._trusted: set[str] = set()
        _copy(root, folder / "tree")
        self._process = self._start()

    def attempt(self, mutant: Mutant) -> Trial:
        """Plant the mistake, run the tests, take the mistake out again."""
        tests = self._reach.affordable(self._reach.of(mutant.path, mutant.function), self._budget_s)
        target = self._folder / "tree" / mutant.path
        original = target.read_text(encoding="utf-8")
        while True:
            asked = [test for test in tests if test not in self._untrusted]
            target.write_text(mutated_source(self._root, mutant), encoding="utf-8")
            try:
                answer = self._ask(_module(mutant.path), asked)
            finally:
                target.write_text(original, encoding="utf-8")
            if answer["outcome"] == "unknown":
                # The set of tests may depend on the product.
                if self._ask(None, asked, collect_only=True)["outcome"] == "unknown":
                    raise RuntimeError(
                        "tests have changed since it was recorded what they reach: record anew, with --record"
                    )
                return Trial(mutant, "caught", "collection", len(asked), answer["seconds"])
            by = answer["by"].removesuffix(" (collection)")
            if answer["outcome"] != "caught" or not by or self._passes_without(by):
                return Trial(mutant, answer["outcome"], answer["by"], len(asked), answer["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _passes_without(self, test: str) -> bool:
        """True if a test passes on the product as it is, here and alone: one that does not, proves nothing."""
        if test not in self._trusted:
            if self._ask(None, [test])["outcome"] == "survived":
                self._trusted.add(test)
            else:
                self._untrusted.add(test)
        return test in self._trusted

    def _ask(self, module: str | None, tests: list[str], *, collect_only: bool = False) -> dict[str, Any]:
        expected_s = sum(self._reach.seconds.get(test, 1.0) for test in tests)
        log = str(self._folder / "tests.log")
        request = {
            "module": module,
            "tests": tests,
            "timeout_s": 120 + 4 * expected_s,
            "log": log,
            "collect_only": collect_only,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs the tests has died: see {self._folder}/zygote.log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        tree = self._folder / "tree"
        beside = self._root.parent / "shared" / "golden"
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
        }
        if beside.is_dir():
            # Beside the copy there is none.
            environment.setdefault("MEGAMEM_GOLDEN_DIR", str(beside))
        with open(self._folder / "zygote.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.zygote"],
                cwd=tree,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the process that runs the tests did not start: see {self._folder}/zygote.log")
        return process


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _copy(root: Path, tree: Path) -> None:
    """A clone of the repository with what is not committed yet: some tests ask git which files there are."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", str(root), str(tree)], check=True)
    for option, act in (("-d", _remove), ("-m", shutil.copy), ("-o", shutil.copy)):
        listed = subprocess.run(
            ["git", "ls-files", option, "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
        )
        for path in listed.stdout.splitlines():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            if option == "-d" or (root / path).exists():
                act(root / path, tree / path)


def _remove(_: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
