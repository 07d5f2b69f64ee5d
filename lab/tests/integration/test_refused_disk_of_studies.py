"""Every command of the laboratory meets a full disk and one that cannot be written, as the product's do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Megamem
from refused_disk import REFUSALS, arguments, assert_one_line

from lab.commands import COMMANDS, STUDIES
from tests.every_command import commands_of
from tools.cli import build_parser

WRITERS: dict[str, str] = {
    "data synthetic": "{corpus} --output {place}/made --documents 2 --lengths 256 --tasks needle",
    "study probe": "{place}/run --samples 1 --nproc 1",
    "study analyse frequency": "{place}/run --nproc 1",
    "study analyse layer-drop": "{place}/run --nproc 1",
    "study analyse heads": "{place}/run --nproc 1",
    "study analyse collapse": "{place}/run --nproc 1",
    "study bench hardware": "--write {place}/made.yaml --rounds 1 --nproc 1",
    "study bench updates": "{config} --vary optimizer.value_lr_multiplier=1 --rounds 1 --report {place}/made.md",
    "study compare": "{config} --run-dir {place}/made --nproc 1",
    "study recall": "{config} --run-dir {place}/made",
    "study teach": "{place}/run --run-dir {place}/made",
    "study fit": "{place} --report {place}/made.md",
    "gpu-check": "--device cpu --output {place}/made.md",
    "study bench files": "{repository}/configs/engram/small.yaml optimizer.tables=row_wise optimizer.table_gradients=rows "
    "--folders {place}/made --rounds 1 --steps 1",
}
"""Commands that write, each with arguments that make it write into the place, the earlier the cheaper."""

OTHERS = {
    "study analyse routing": "wants a model that `analyse layer-drop`, which is the same code, does not want",
    "study analyse ngrams": "wants a model of n-grams, and is else the code of `analyse frequency`",
    "study bench step": "prints",
    "study bench kernels": "prints",
    "study bench context": "prints",
    "study bench generate": "prints",
    "study bench": "prints",
    "study watch": "prints",
    "study bench tables": "wants gigabytes; removes what it has written",
}
"""Commands left out here, with the reason; unit/test_lab_commands.py gives them a closed and a full standard output."""


@pytest.mark.parametrize("refused", REFUSALS, indirect=True)
@pytest.mark.parametrize("command", WRITERS)
def test_what_a_study_cannot_write_is_one_line(
    megamem: Megamem,
    words: dict[str, Path],
    place: Path,
    refused: Callable[[], None],
    command: str,
    request: pytest.FixtureRequest,
) -> None:
    result = megamem(*arguments(command, WRITERS[command], words), before=refused)
    assert_one_line(result, place, request.node.callspec.params["refused"])


def test_every_command_of_the_laboratory_is_in_one_of_the_tables() -> None:
    named = [*WRITERS, *OTHERS]
    assert sorted(named) == sorted(set(named))
    of_the_product = {*commands_of(build_parser((), ()))}
    assert {*commands_of(build_parser(COMMANDS, STUDIES))} - of_the_product == set(named)
