"""Single mistakes that a careless developer could make in a source file.

The small changes of an expression are mutmut's. Left out of them are those that crash wherever they run (a value
replaced by None), because to catch one proves nothing; added are a dropped statement, two arguments in the wrong order,
and a condition turned round. Text is left alone: docstrings, messages of errors, f-strings, and annotations but for the
conditions in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

PACKAGES = ("kernels", "megamem", "parallel", "pretrain")


@dataclass(frozen=True)
class Mutant:
    """One mistake in one file.

    Attributes:
        path: path of the file, from the repository's root.
        number: its place among the mistakes of this file.
        line: line that has it.
        function: dotted name of the function or class around it; empty at module level.
        operator: the kind of mistake.
        before: the code as it is.
        after: the code with the mistake.
        occurrence: its place among the same mistakes of the same function.
    """

    path: str
    number: int
    line: int
    function: str
    operator: str
    before: str
    after: str
    occurrence: int

    @property
    def key(self) -> str:
        """Names the mistake for as long as its function does not change, wherever in the file it stands."""
        return "|".join((self.path, self.function, self.operator, self.before, self.after, str(self.occurrence)))

    def __str__(self) -> str:
        return f"{self.path}:{self.line} [{self.operator}] {_one_line(self.before)}  ->  {_one_line(self.after)}"


def _one_line(code: str) -> str:
    text = " ".join(code.split())
    return text if len(text) <= 150 else text[:147] + "..."


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """All mistakes in a file."""
    return [mutant for mutant, _, _ in _found(root, path)[1]]


def mutated_source(root: Path, mutant: Mutant) -> str:
    """The text of the file with the mistake in it."""
    module, found = _found(root, mutant.path)
    there, node, replacement = found[mutant.number]
    assert there == mutant, f"{mutant.path} has changed since its mutants were listed"
    changed = module.deep_replace(node, replacement)
    assert isinstance(changed, cst.Module)
    return changed.code


Found = tuple[Mutant, cst.CSTNode, cst.CSTNode]


def _found(root: Path, path: str) -> tuple[cst.Module, list[Found]]:
    wrapper = MetadataWrapper(cst.parse_module((root / path).read_text(encoding="utf-8")))
    visitor = _Visitor(path, wrapper.module)
    wrapper.visit(visitor)
    return wrapper.module, visitor.found


class _Visitor(cst.CSTVisitor):
    """Collects the mistakes of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: str, module: cst.Module) -> None:
        super().__init__()
        self.found: list[Found] = []
        self._path = path
        self._module = module
        self._scopes: list[str] = []
        self._seen: Counter[tuple[str, str, str, str]] = Counter()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._scopes.append(node.name.value)
        if _is_text(node):
            return False
        if isinstance(node, cst.Annotation):
            # Where a field has an effect stands in its annotation, as a function.
            for function in m.findall(node, m.Lambda()):
                function.visit(self)
            return False
        for operator, replacement in _replacements(node):
            position = self.get_metadata(PositionProvider, node)
            before, after = self._module.code_for_node(node), self._module.code_for_node(replacement)
            if before.strip() != after.strip():
                function = ".".join(self._scopes)
                same = (function, operator, before, after)
                self._seen[same] += 1
                mutant = Mutant(self._path, len(self.found), position.start.line, *same, occurrence=self._seen[same])
                self.found.append((mutant, node, replacement))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._scopes.pop()


def _is_text(node: cst.CSTNode) -> bool:
    """Messages, invariants of our own, and what exists for type checkers."""
    if isinstance(node, cst.Raise | cst.Assert | cst.Decorator | cst.BaseString | cst.Import | cst.ImportFrom):
        return True
    if isinstance(node, cst.Call):
        return m.matches(node.func, m.Name("print") | m.Name("TypeVar") | m.Name("cast"))
    if isinstance(node, cst.Arg):
        # zip's own assertion.
        return m.matches(node, m.Arg(keyword=m.Name("strict")))
    return m.matches(node, m.Assign(targets=[m.AssignTarget(m.Name("__all__"))]))


_CRASHING = (mutators.operator_assignment, mutators.operator_lambda, mutators.operator_string)


def _replacements(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    for kind, operator in mutators.mutation_operators:
        if isinstance(node, kind) and operator not in _CRASHING:
            name = operator.__name__.removeprefix("operator_")
            for replacement in operator(node):
                if operator is mutators.operator_arg_removal and not _may_have_a_default(node, replacement):
                    continue
                yield name, replacement
    if isinstance(node, cst.SimpleStatementLine):
        yield from (("dropped", line) for line in _without_statement(node))
    if isinstance(node, cst.Call):
        yield from (("swapped", call) for call in _with_arguments_swapped(node))
    if isinstance(node, cst.If | cst.While | cst.IfExp) and not m.matches(
        node.test, m.Comparison() | m.UnaryOperation()
    ):
        test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield "negated", node.with_changes(test=cst.UnaryOperation(cst.Not(), test))


def _may_have_a_default(call: cst.CSTNode, shorter: cst.CSTNode) -> bool:
    """True if a call lost a named argument or the last one: without another the call would crash."""
    assert isinstance(call, cst.Call)
    assert isinstance(shorter, cst.Call)
    if len(shorter.args) == len(call.args):
        return False
    kept = {id(argument) for argument in shorter.args}
    gone = next(argument for argument in call.args if id(argument) not in kept)
    return not _is_text(gone) and (gone.keyword is not None or gone is call.args[-1])


def _without_statement(line: cst.SimpleStatementLine) -> Iterable[cst.SimpleStatementLine]:
    """The line without what it does to the world: a call, or an assignment to an attribute or an item."""
    effect = m.Expr(m.Call()) | m.AugAssign() | m.Assign(targets=[m.AssignTarget(m.Attribute() | m.Subscript())])
    of_super = m.Expr(m.Call(func=m.Attribute(value=m.Call(func=m.Name("super")), attr=m.Name("__init__"))))
    printed = m.Expr(m.Call(func=m.Name("print")))
    if len(line.body) == 1 and m.matches(line.body[0], effect) and not m.matches(line.body[0], of_super | printed):
        yield line.with_changes(body=[cst.Pass()])


def _with_arguments_swapped(call: cst.Call) -> Iterable[cst.Call]:
    """Neighbours in the wrong order, where both are plain names."""
    plain = m.Arg(value=m.Name() | m.Attribute(), keyword=None, star="")
    for index in range(len(call.args) - 1):
        left, right = call.args[index : index + 2]
        if m.matches(left, plain) and m.matches(right, plain):
            pair = [left.with_changes(value=right.value), right.with_changes(value=left.value)]
            yield call.with_changes(args=[*call.args[:index], *pair, *call.args[index + 2 :]])
