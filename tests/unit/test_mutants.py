"""Mistakes that `make mutants` plants, code that it leaves alone, and what it calls caught."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.costly import COSTLY
from tests.mutants import zygote

CODE = '''\
"""A docstring with a < b."""

LIMIT = 3


def first(a: int = 1, *, flag: bool = True) -> "list[int]":
    """Another, True and 1 + 1."""
    if a < LIMIT and flag:
        raise ValueError(f"a is {a + 1}, not {LIMIT - 1}")
    assert a != 2, "an invariant"
    print(a + 1)
    things.append(a)
    return second(a, LIMIT)
'''


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    """Needs mutmut, which `make test-more` installs."""
    pytest.importorskip("mutmut", reason="make test-more and make mutants install it")
    from tests.mutants import operators

    return operators


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "file.py").write_text(CODE, encoding="utf-8")
    return tmp_path


def test_the_mistakes_of_a_snippet(operators: ModuleType, root: Path) -> None:
    found = [(m.line, m.operator, m.before.strip(), m.after.strip()) for m in operators.mutants_of(root, "file.py")]
    # Nothing in docstrings, annotations, what is raised or printed, and invariants of our own.
    assert [mistake for mistake in found if mistake[1] != "negated"] == [
        (3, "number", "3", "4"),
        (6, "number", "1", "2"),
        (6, "name", "True", "False"),
        (8, "swap_op", "a < LIMIT and flag", "a < LIMIT or flag"),
        (8, "swap_op", "< LIMIT", "<= LIMIT"),
        (12, "dropped", "things.append(a)", "pass"),
        (13, "arg_removal", "second(a, LIMIT)", "second(a, )"),
        (13, "swapped", "second(a, LIMIT)", "second(LIMIT, a)"),
    ]


def test_a_condition_is_turned_round(operators: ModuleType, root: Path) -> None:
    (negated,) = [m for m in operators.mutants_of(root, "file.py") if m.operator == "negated"]
    changed = operators.mutated_source(root, negated)
    assert "if not (a < LIMIT and flag):" in changed
    assert changed.replace("not (a < LIMIT and flag)", "a < LIMIT and flag") == CODE


def test_each_mistake_changes_one_line(operators: ModuleType, root: Path) -> None:
    for mutant in operators.mutants_of(root, "file.py"):
        changed = operators.mutated_source(root, mutant).splitlines()
        pairs = zip(CODE.splitlines(), changed, strict=True)
        assert [number for number, (old, new) in enumerate(pairs, start=1) if old != new] == [mutant.line]


def test_a_mistake_keeps_its_name_when_code_moves_and_not_its_place(operators: ModuleType, root: Path) -> None:
    before = operators.mutants_of(root, "file.py")
    (root / "file.py").write_text("ADDED = 7\n" + CODE, encoding="utf-8")
    after = operators.mutants_of(root, "file.py")
    assert {m.key for m in before} < {m.key for m in after}
    assert len({m.key for m in after}) == len(after)
    with pytest.raises(AssertionError, match="has changed"):
        operators.mutated_source(root, before[0])


@COSTLY
@pytest.mark.parametrize(
    ("source", "tests", "outcome", "by"),
    [
        ("def f(x): return x + 1\n", ["test_it.py"], "survived", ""),
        ("def f(x): return x - 1\n", ["test_it.py"], "caught", "test_it.py::test_f"),
        ("def f(x): return nothing\n", ["test_it.py::test_other"], "survived", ""),
        ("def f(x) return\n", ["test_it.py"], "broken", ""),
        ("def f(x):\n    while True: pass\n", ["test_it.py"], "timeout", ""),
        ("def f(x): return x + 1\n", ["test_it.py::test_gone"], "unknown", ""),
    ],
    ids=["survived", "caught", "not reached", "broken", "timeout", "unknown"],
)
def test_what_becomes_of_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, tests: list[str], outcome: str, by: str
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "toy_product.py").write_text(source, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        "from toy_product import f\ndef test_other(): assert f\ndef test_f(): assert f(1) == 2\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    timeout_s = 3.0 if outcome == "timeout" else 60.0
    answer = zygote.attempt("toy_product", tests, timeout_s, str(tmp_path / "log"), collect_only=False)
    assert (answer["outcome"], answer["by"]) == (outcome, by), (tmp_path / "log").read_text()
