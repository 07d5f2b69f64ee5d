"""Every command meets a full disk and one that cannot be written: one line that names the place, and no traceback.

A command that is in no table here fails the last test.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Megamem
from engine_stand_in import engine_stand_in
from refused_disk import make_full, make_read_only, own_mounts

from tests.every_command import commands_of
from tools.cli import build_parser

REPOSITORY = Path(__file__).parents[2]

WRITERS: dict[str, str] = {
    "train": "{config} --run-dir {place}/new --nproc 1",
    "replay": "{place}/run --nproc 1 --step 3",
    "data prepare": "{texts} --output {place}/made --workers 1 --tokenizer bytes",
    "data tokenizer": "{texts} --vocab-size 257 --output {place}/made.json",
    "data compress": "bytes --output {place}/made.npy",
    "data package": "megamem==0 --files *.txt --output {place}/made.jsonl",
    "data codes": "{images} --patch 2 --codes 2 --output {place}/made.npz",
    "data synthetic": "{corpus} --output {place}/made --documents 2 --lengths 256 --tasks needle",
    "study probe": "{place}/run --samples 1 --nproc 1",
    "study analyse frequency": "{place}/run --nproc 1",
    "study analyse layer-drop": "{place}/run --nproc 1",
    "study analyse heads": "{place}/run --nproc 1",
    "study analyse collapse": "{place}/run --nproc 1",
    "tables": "{place}/run --form int8 --output {place}/made",
    "checkpoint convert": "{place}/run {place}/made",
    "serve": "{place}/run --python {engine}",
    "upscale": "{place}/run --blocks 1 --insert llama-pro --output {place}/made",
    "plot": "{place}/run",
    "report": "{place}/run",
    "study bench hardware": "--write {place}/made.yaml --rounds 1 --nproc 1",
    "study bench updates": "{config} --vary optimizer.value_lr_multiplier=1 --rounds 1 --report {place}/made.md",
    "study bench files": "{repository}/configs/engram/small.yaml optimizer.tables=row_wise optimizer.table_gradients=rows "
    "--folders {place}/made --rounds 1 --steps 1",
    "plan": "{repository}/configs/ultramemv2/2.5b_25b.yaml --gpus 8 --gpu h100-80g --write {place}/made.yaml",
    "study compare": "{config} --run-dir {place}/made --nproc 1",
    "study recall": "{config} --run-dir {place}/made",
    "study fit": "{place} --report {place}/made.md",
    "gpu-check": "--device cpu --output {place}/made.md",
}
"""Commands that write, each with arguments that make it write into the place, the earlier the cheaper."""

READERS: dict[str, str] = {
    "data inspect": "{corpus}",
    "data verify": "{corpus}",
    "checkpoint inspect": "{place}/run",
    "checkpoint verify": "{place}/run",
    "checkpoint diff": "{place}/run {place}/run",
    "status": "{place}",
    "config show": "{config}",
    "config table": "{repository}/configs/ultramemv2/430m_5b.yaml",
}
"""Commands that write nothing, and so are not refused; more of them are in `OTHERS`."""

OTHERS = {
    "eval": "reads a run, as `checkpoint verify` does, and prints",
    "generate": "reads a run, as `checkpoint verify` does, and prints",
    "study analyse routing": "wants a model that `analyse layer-drop`, which is the same code, does not want",
    "study analyse ngrams": "wants a model of n-grams, and is else the code of `analyse frequency`",
    "submit": "wants a cluster: see test_slurm.py",
    "cancel": "wants a cluster: see test_slurm.py",
    "cluster check": "wants a cluster: see test_slurm.py",
    "study bench step": "prints",
    "study bench kernels": "prints",
    "study bench context": "prints",
    "study bench generate": "prints",
    "study bench": "prints",
    "study bench tables": "wants gigabytes; removes what it has written",
    "dryrun": "prints",
    "config ffn-width": "prints",
    "cluster keys": "prints",
    "doctor": "prints",
    "config check": "says whether a run's folder could be written, and prints",
}
"""Commands left out here, with the reason; unit/test_refusals.py gives them a closed and a full standard output."""


def _try_own_mounts(answer: Any) -> None:
    try:
        own_mounts()
        answer.put("")
    except OSError as error:
        answer.put(str(error))


@pytest.fixture(scope="module", autouse=True)
def _mounts_are_allowed(warm: None) -> None:
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=_try_own_mounts, args=(answer,))
    process.start()
    reason = answer.get()
    process.join()
    if reason:
        pytest.skip(f"this machine allows no mounts of one's own: {reason}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, saved_run: Path) -> Path:
    """The folder that is refused, with a run in it."""
    path = tmp_path_factory.mktemp("place")
    shutil.copytree(saved_run, path / "run")
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, place: Path, corpus: Path, config_file: Path) -> dict[str, Path]:
    """Texts for the names in braces."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("def f(x):\n    return x\n" * 9)
    (folder / "texts" / "b.txt").write_text("print(1)\n" * 9)
    pixels = np.arange(4 * 4 * 4, dtype=np.float64).reshape(4, 4, 4, 1)
    np.savez(folder / "images.npz", images=pixels, classes=np.arange(4))
    return {
        "place": place,
        "corpus": corpus,
        "config": config_file,
        "texts": folder / "texts",
        "images": folder / "images.npz",
        "repository": REPOSITORY,
        "engine": engine_stand_in(folder / "engine", "vllm")[0],
    }


def _read_only(place: Path, side: Path) -> None:
    own_mounts()
    make_read_only(place)


def _full(place: Path, side: Path) -> None:
    own_mounts()
    make_full(place, side)


REFUSALS = {"Read-only file system": _read_only, "No space left on device": _full}


@pytest.fixture
def refused(place: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Run before a command: has the disk refuse the place, which is its current folder."""

    def before() -> None:
        REFUSALS[request.param](place, tmp_path)
        os.chdir(place)

    return before


def _arguments(command: str, rest: str, words: dict[str, Path]) -> list[str]:
    return [*command.split(), *(word.format_map(words) for word in rest.split())]


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
    result = megamem(*_arguments(command, WRITERS[command], words), before=refused)
    assert "Traceback" not in result.output, result.output
    assert result.code in (2, 3, 4), result.output
    assert result.last_line.startswith("megamem: error: "), result.output
    assert str(place) in result.last_line
    reason = request.node.callspec.params["refused"]
    assert reason in result.last_line, result.output


@pytest.mark.parametrize("refused", ["Read-only file system"], indirect=True)
@pytest.mark.parametrize("command", READERS)
def test_what_only_reads_is_not_refused(
    megamem: Megamem, words: dict[str, Path], refused: Callable[[], None], command: str
) -> None:
    result = megamem(*_arguments(command, READERS[command], words), before=refused)
    assert result.code == 0, result.output


def test_every_command_is_in_one_of_the_tables() -> None:
    named = [*WRITERS, *READERS, *OTHERS]
    assert sorted(named) == sorted(set(named))
    assert set(commands_of(build_parser())) == set(named)
