"""List of what this code takes from Megatron-core, and what another version of it has moved.

`python -m lab.maintenance.engine` compares the version that is installed with the newest recorded one before it, and
prints a line per difference; `--record` writes its record, which `lab/tests/unit/test_engine.py` holds it to. A record has a
line for each

- class, function or module that is imported,
- method of Megatron's that a class of ours replaces: its signature, and a hash of its code, which says whether it should
  be read again,
- function that `parallel.machine.cpu` replaces where there is no GPU.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import EnumMeta
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from parallel.machine.cpu import REDIRECTIONS

REPOSITORY = Path(__file__).parents[2]
RECORDS = REPOSITORY / "lab" / "tests" / "unit" / "engine"
ROOMS = ("kernels", "megamem", "parallel", "pretrain", "slurm", "tools", "lab")
ENGINE = "megatron"
_HASH_LENGTH = 12


def reliances() -> dict[str, str]:
    """Names that are relied on, each with what it looks like in the version that is installed."""
    found = {name: _appearance(name) for name in sorted({*imported(), *redirected()})}
    for method in replaced():
        found[method] = f"{_appearance(method)} {_digest(pkgutil.resolve_name(method))}"
    return dict(sorted(found.items()))


def imported() -> dict[str, str]:
    """Names that are imported from the engine, as in megatron.core.transformer.mlp:MLP, with the first file that does."""
    found: dict[str, str] = {}
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == ENGINE:
                for alias in node.names:
                    found.setdefault(f"{node.module}:{alias.name}", file.relative_to(REPOSITORY).as_posix())
    return found


def redirected() -> Iterator[str]:
    """Functions of the engine that the CPU stands in for."""
    for path in REDIRECTIONS:
        if path.startswith(f"{ENGINE}."):
            yield ":".join(path.rsplit(".", 1))


def replaced() -> dict[str, str]:
    """Methods of the engine that classes of ours define anew, with the file of one that does."""
    found: dict[str, str] = {}
    for ours in _classes():
        for name in vars(ours):
            base = next((each for each in ours.__mro__[1:] if name in vars(each)), None)
            if base is not None and _is_engines(base) and callable(getattr(base, name)) and not _is_made(name):
                method = f"{base.__module__}:{base.__qualname__}.{name}"
                found.setdefault(method, ours.__module__.replace(".", "/") + ".py")
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each name whose appearance is another."""
    users = {**imported(), **replaced()}
    for name in sorted({*before, *now}):
        was, is_now = before.get(name), now.get(name)
        if was == is_now:
            continue
        who = f"{name} ({users[name]})" if name in users else name
        if was is None:
            yield f"{who} is not in the record: record it"
        elif is_now is None:
            yield f"{who} is relied on no more: record that"
        elif is_now == MISSING:
            yield f"{who} is gone: it was {was}"
        elif _signature(was) == _signature(is_now):
            yield f"{who} has other code: read what we replace"
        else:
            yield f"{who} {_moved(was, is_now)}"


MISSING = "missing"


def read_record(name: str) -> dict[str, str]:
    """The record of a version."""
    lines = (RECORDS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def recorded_versions() -> list[str]:
    """Versions that have a record, the newest last."""
    return sorted((file.stem for file in RECORDS.glob("*.txt")), key=Version)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record of the version that is installed")
    args = parser.parse_args(words)
    installed, now = version("megatron-core"), reliances()
    before = [name for name in recorded_versions() if Version(name) < Version(installed)]
    for name in before[-1:]:
        print(f"From {name} to {installed}:")
        print("\n".join(f"  {line}" for line in differences(read_record(name), now)) or "  nothing moved")
    if args.record:
        RECORDS.mkdir(exist_ok=True)
        text = "".join(f"{name} {appearance}\n" for name, appearance in now.items())
        (RECORDS / f"{installed}.txt").write_text(text, encoding="utf-8")
    return 0


def _files() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((REPOSITORY / room).rglob("*.py"))


def _classes() -> Iterator[type]:
    """Classes of ours that derive from the engine's, of the files that import something of it or of those classes."""
    for file in _files():
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        if module.endswith("__main__"):
            continue
        try:
            found = import_module(module)
        except ImportError:
            # Triton's kernels, where Triton is missing, and whatever else an extra brings.
            continue
        for value in vars(found).values():
            if isinstance(value, type) and value.__module__ == module and any(map(_is_engines, value.__mro__)):
                yield value


def _is_engines(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == ENGINE


def _is_made(name: str) -> bool:
    """True for what Python makes of a class."""
    return (name.startswith("__") and name != "__init__") or name == "_abc_impl"


def _appearance(name: str) -> str:
    """Signature of a callable, members of an enumeration, kind of anything else."""
    try:
        found = pkgutil.resolve_name(name)
    except AttributeError:
        try:
            found = import_module(name.replace(":", "."))
        except ImportError:
            return MISSING
    except ImportError:
        return MISSING
    if not callable(found):
        return type(found).__name__
    if isinstance(found, EnumMeta):
        # Its signature is Python's, and another in every version of that.
        return f"({', '.join(found.__members__)})"
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return type(found).__name__
    return f"({', '.join(_parameters(parameters))})"


def _parameters(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    """Parameters without annotations, whose text differs between versions of Python."""
    for each in parameters:
        is_rest, are_others = each.kind is each.VAR_POSITIONAL, each.kind is each.VAR_KEYWORD
        stars = "*" * is_rest + "**" * are_others
        keyword = "kw:" if each.kind is each.KEYWORD_ONLY else ""
        yield f"{keyword}{stars}{each.name}{'' if each.default is each.empty else '='}"


def _digest(method: Any) -> str:
    try:
        code = textwrap.dedent(inspect.getsource(method))
    except OSError:
        # A dataclass has no source of its `__init__`: its parameters say it all.
        code = str(inspect.signature(method))
    return hashlib.sha256(code.encode()).hexdigest()[:_HASH_LENGTH]


def _moved(was: str, is_now: str) -> str:
    """Parameters that another version has lost and gained, or their other order."""
    before, after = (_signature(each).strip("()").split(", ") for each in (was, is_now))
    lost, gained = [each for each in before if each not in after], [each for each in after if each not in before]
    said = [f"lost {', '.join(lost)}"] * bool(lost) + [f"gained {', '.join(gained)}"] * bool(gained)
    return " and ".join(said) or f"has its parameters in another order: {', '.join(after)}"


def _signature(appearance: str) -> str:
    """The appearance without the hash of a method's code."""
    signature, bracket, _ = appearance.partition(")")
    return signature + bracket


if __name__ == "__main__":
    sys.exit(main())
