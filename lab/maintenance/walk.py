"""Files that a key's value passes in `megamem train`, from YAML to the first memory kernel of the first step.

`python -m lab.maintenance.walk configs/quickstart.yaml model.memory.top_k=61 model.memory.num_keys=67` prints them in
order. A function is passed if it is given the value or returns it, if it is given the section that holds it, or if it is
a method that names the key, of the section or of an object that holds it (with --methods all of the section's methods).
Each counts once; functions of one file that follow each other are one stay. A return is a stay in a file that was left
before. Kernels that initial weights need are left out.

The value is to be one that no other number has. Further overrides are given to the run, which trains in a folder that is
removed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from megamem.config.base import Config, field_specs
from parallel.machine.devices import hide_gpus
from parallel.processes.launch import launch_ranks
from pretrain.config.bases import read_with_bases
from pretrain.config.source import Node, apply_overrides, dump_yaml, to_plain
from pretrain.config.stages import read_run
from pretrain.planning.dryrun.lines import our_path
from pretrain.run.folder import RunFolder
from pretrain.run.preflight import check_stages
from tools.train import train_rank

REPOSITORY = Path(__file__).parents[2]
_STEP = str(REPOSITORY / "pretrain" / "train" / "loop.py")


@dataclass
class Walk:
    """Functions that a value has passed so far, each once: file and name. To be given to `sys.setprofile`."""

    name: str
    """Last name of the key."""
    value: int
    methods: bool = False
    """Count all methods of the section."""
    passed: dict[CodeType, tuple[str, str]] = field(default_factory=dict)
    arrived: bool = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.arrived or code in self.passed or code.co_name == "<module>":
            return
        if (path := our_path(code.co_filename)) is None:
            return
        in_kernel = path.startswith("kernels/")
        if in_kernel and not _in_step(frame):
            return
        if not (self._is_given(frame) if event == "call" else event == "return" and self._is_value(argument)):
            return
        self.passed[code] = (path, code.co_qualname)
        self.arrived = in_kernel

    def _is_given(self, frame: FrameType) -> bool:
        code = frame.f_code
        holder = frame.f_locals.get("self")
        given = [frame.f_locals[name] for name in _parameters(code) if name in frame.f_locals and name != "self"]
        if any(self._is_value(each) or self._is_section(each) for each in given):
            return True
        if self._is_section(holder):
            return self.methods or self.name in code.co_names
        held = getattr(holder, "__dict__", {}).values() if self.name in code.co_names else ()
        return not isinstance(holder, Config) and any(self._is_section(each) for each in held)

    def _is_value(self, given: Any) -> bool:
        if isinstance(given, Node):
            return self._is_value(given.value)
        return (type(given) is int and given == self.value) or (type(given) is str and given == str(self.value))

    def _is_section(self, given: Any) -> bool:
        if isinstance(given, Node):
            return self._is_section(given.value)
        if isinstance(given, Mapping):
            return self.name in given and self._is_value(given[self.name])
        if isinstance(given, Config) and self.name in field_specs(type(given)):
            # Objects that are being made have no values yet.
            return self._is_value(vars(given).get(self.name))
        return False

    def stays(self) -> list[tuple[str, list[str]]]:
        """Files in the order of the walk, each with the functions passed before the next one."""
        found: list[tuple[str, list[str]]] = []
        for file, function in self.passed.values():
            if not found or found[-1][0] != file:
                found.append((file, []))
            found[-1][1].append(function)
        return found


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _in_step(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _STEP:
            return True
        frame = frame.f_back
    return False


def main(argv: Sequence[str]) -> int:
    """Train one step, and print the walk."""
    hide_gpus()
    parser = argparse.ArgumentParser(prog="python -m lab.maintenance.walk", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("key", help="KEY=NUMBER")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--methods", action="store_true", help="count all methods of the section")
    args = parser.parse_args(argv)
    key, _, number = args.key.partition("=")
    walk = Walk(key.rpartition(".")[2], int(number), args.methods)
    with tempfile.TemporaryDirectory() as scratch:
        # The walk begins at a file's value, and not at an argument's.
        tree = apply_overrides(read_with_bases(args.config), [args.key, *args.overrides, "train.num_steps=1"])
        file, folder = Path(scratch) / "config.yaml", RunFolder(Path(scratch) / "run")
        file.write_text(dump_yaml(to_plain(tree)), encoding="utf-8")
        sys.setprofile(walk)
        stages = read_run(file).stages()
        check_stages(stages, 1, folder, local=True)
        folder.make()

        def on_rank() -> list[tuple[str, list[str]]]:
            train_rank(stages, folder, quiet=True)
            return walk.stays()

        # A fork goes on with the profile.
        (stays,) = launch_ranks(on_rank, 1)
        sys.setprofile(None)
    files: list[str] = []
    for name, functions in stays:
        print(f"{name}{' (again)' if name in files else ''}: {', '.join(functions)}")
        files += [name] if name not in files else []
    print(f"{len(files)} files, {len(stays) - len(files)} returns")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
