"""A patch of every family's model fits its export: the model is known there, and so are its tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from exported_models import export_to
from huggingface_models import MODELS, TOKEN_MAP, VOCAB_SIZE
from tiny_runs import SHARED, build_chunks, joined

from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.names import NATIVE
from pretrain.convert.registry import open_checkpoint
from pretrain.convert.resources import Resources
from pretrain.patch.apply import change, status_text
from pretrain.patch.file import read_patch
from pretrain.patch.identity import tables_of
from pretrain.patch.make import make_patch
from tests.changed_rows import ChangedRows
from tests.rotation import named_in_rotation
from tests.whole_tensors import whole_tensors

RESOURCES = Resources(1, 2 << 30)
# One of each family, and of each pair of families.
NAMES = {tuple(memory.kind for memory in model.families.values()): name for name, model in MODELS.items()}
TABLES = {name: MODELS[name] for kinds, name in NAMES.items() if kinds}


def silent(*_: object) -> Any:
    return lambda _: None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_family_is_patched_in_its_export(run_ranks: Any, tmp_path: Path) -> None:
    np.save(tmp_path / TOKEN_MAP, np.arange(VOCAB_SIZE, dtype=np.int32) % 50)

    def main() -> list[str]:
        problems = []
        with joined(SHARED) as groups:
            for number, (name, model) in enumerate(named_in_rotation(TABLES).items()):
                config = replace(SHARED, model=model)
                if getattr(model.memory, "token_map", None) is not None:
                    memory = replace(model.memory, token_map=str(tmp_path / TOKEN_MAP))  # type: ignore[type-var]
                    config = replace(config, model=replace(model, memory=memory))
                (chunk,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE)
                folder = tmp_path / f"{number}"
                export_to(folder, config, chunk)
                before = contents(folder)
                sized = replace(config, model=replace(config.model, vocab_size=VOCAB_SIZE))
                run = OpenedCheckpoint(Path("run"), NATIVE, whole_tensors(chunk), sized)
                rows = {table: (0, shape[0] - 1) for table, shape in tables_of(run).items()}
                trained = replace(run, reader=ChangedRows(run.reader, rows, 0.01))
                path = tmp_path / f"{number}.safetensors"
                make_patch(run, trained, path, max_bytes=1 << 20, resources=RESOURCES, on_start=silent)
                patch = read_patch(path)
                states = [status_text(patch, open_checkpoint(folder), RESOURCES, silent)]
                for side in ("after", "before"):
                    change(patch, folder, None, to=side, output=None, resources=RESOURCES, on_start=silent)
                    states.append(status_text(patch, open_checkpoint(folder), RESOURCES, silent))
                    if side == "after":
                        found = open_checkpoint(folder).reader
                        for table, ids in rows.items():
                            whole = found.tensors[table].whole(table)
                            if not (found.read(whole) == trained.reader.read(whole)).all():
                                states.append(f"{table} {ids}")
                if states != ["not applied", "applied", "not applied"] or contents(folder) != before:
                    problems.append(f"{name}: {states}")
        return problems

    assert run_ranks(main, 1) == [[]]
    assert len(TABLES) > 12
