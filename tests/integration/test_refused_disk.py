"""Every command meets a full disk and one that cannot be written: one line that names the place, and no traceback.

A command that is in no table here fails the last test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Megamem
from refused_disk import REFUSALS, arguments, assert_one_line

from tests.every_command import commands_of
from tools.cli import build_parser

WRITERS: dict[str, str] = {
    "train": "{config} --run-dir {place}/new --nproc 1",
    "replay": "{place}/run --nproc 1 --step 3",
    "data prepare": "{texts} --output {place}/made --workers 1 --tokenizer bytes",
    "data tokenizer": "{texts} --vocab-size 257 --output {place}/made.json",
    "data compress": "bytes --output {place}/made.npy",
    "tables": "{place}/run --form int8 --output {place}/made",
    "checkpoint convert": "{place}/run {place}/made",
    "patch counts": "{place}/run --output {place}/made.npz",
    "patch make": "{place}/run {place}/run --output {place}/made.safetensors",
    "patch apply": "{patch} {place}/run",
    "patch revert": "{patch} {place}/run",
    "patch merge": "{patch} {patch} --output {place}/made.safetensors",
    "serve": "{place}/run --python {engine}",
    "upscale": "{place}/run --blocks 1 --insert llama-pro --output {place}/made",
    "plot": "{place}/run",
    "report": "{place}/run",
    "plan": "{repository}/configs/ultramemv2/2.5b_25b.yaml --gpus 8 --gpu h100-80g --count 0 --write {place}/made.yaml",
}
"""Commands that write, each with arguments that make it write into the place, the earlier the cheaper."""

READERS: dict[str, str] = {
    "data inspect": "{corpus}",
    "data verify": "{corpus}",
    "checkpoint inspect": "{place}/run",
    "checkpoint verify": "{place}/run",
    "checkpoint diff": "{place}/run {place}/run",
    "patch show": "{patch} {place}/run",
    "status": "{place}",
    "config show": "{config}",
    "config table": "{repository}/configs/ultramemv2/430m_5b.yaml",
    "config sizes": "120m d12",
}
"""Commands that write nothing, and so are not refused; more of them are in `OTHERS`."""

OTHERS = {
    "study": "says where the laboratory is (unit/test_added.py)",
    "eval": "reads a run, as `checkpoint verify` does, and prints",
    "generate": "reads a run, as `checkpoint verify` does, and prints",
    "submit": "wants a cluster: see test_slurm.py",
    "cancel": "wants a cluster: see test_slurm.py",
    "cluster check": "wants a cluster: see test_slurm.py",
    "dryrun": "prints",
    "config ffn-width": "prints",
    "cluster keys": "prints",
    "doctor": "prints",
    "config check": "says whether a run's folder could be written, and prints",
}
"""Commands left out here, with the reason; unit/test_refusals.py gives them a closed and a full standard output."""


@pytest.mark.parametrize("refused", REFUSALS, indirect=True)
@pytest.mark.parametrize("command", WRITERS)
def test_what_cannot_be_written_is_one_line(
    megamem: Megamem,
    words: dict[str, Path],
    place: Path,
    refused: Callable[[], None],
    command: str,
    request: pytest.FixtureRequest,
) -> None:
    result = megamem(*arguments(command, WRITERS[command], words), before=refused)
    assert_one_line(result, place, request.node.callspec.params["refused"])


@pytest.mark.parametrize("refused", ["Read-only file system"], indirect=True)
@pytest.mark.parametrize("command", READERS)
def test_what_only_reads_is_not_refused(
    megamem: Megamem, words: dict[str, Path], refused: Callable[[], None], command: str
) -> None:
    result = megamem(*arguments(command, READERS[command], words), before=refused)
    assert result.code == 0, result.output


def test_every_command_is_in_one_of_the_tables() -> None:
    named = [*WRITERS, *READERS, *OTHERS]
    assert sorted(named) == sorted(set(named))
    assert set(commands_of(build_parser((), ()))) == set(named)
