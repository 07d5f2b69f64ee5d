"""Chunks of the product's loops are small in tests, whoever adds one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lab.tests.small_chunks import CHUNKS as OF_THE_LABORATORY
from tests.small_chunks import CHUNKS, OF_STEPS

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("kernels", "megamem", "parallel", "pretrain", "slurm", "tools", "lab")
OF_CHUNKS = re.compile(
    r"_(AT_ONCE|AT_A_TIME|PER_READ|ON_CPU|(READ|PART|BLOCK|SPAN|CHUNK|ITEM|BATCH)_BYTES|"
    r"(WINDOW|SLICE|PART|BLOCK|ROUND)_ELEMENTS|BATCH_RECORDS)$"
)
SET_BY_A_TEST = {
    "megamem.attention.tile._SCORES_AT_A_TIME": "unit/test_attention_tile.py",
    "megamem.layers.usage._SLICE_ELEMENTS": "unit/test_usage.py",
    "pretrain.checkpoint.staging.CHUNK_BYTES": "unit/test_checkpoint_staging.py",
    "pretrain.engine.gradient_norms.NORM_PART_ELEMENTS": "unit/test_gradient_norms.py",
    "pretrain.engine.muon.ROUND_ELEMENTS": "distributed/test_muon.py",
    "pretrain.engine.tables.value_offload.WINDOW_ELEMENTS": "distributed/test_value_offload.py",
    "tools.status._BLOCK_BYTES": "unit/test_status.py",
}
"""Constants that are small in one test alone, mostly as sums depend on them."""
AS_THEY_ARE = {
    "megamem.initialisation.random_fill._PARTS_AT_ONCE": "its test has a hundred parts",
    "pretrain.checkpoint.write_plan.ITEM_BYTES": "an argument of what its test calls",
    "pretrain.data.contents._ZSTD_BYTES_AT_ONCE": "half a kilobyte, of which files of tests have several",
    "pretrain.engine.tables.bf16_gradients._WINDOW_ELEMENTS": "its twin on CPUs is small",
    "pretrain.engine.tables.replica_rows._WINDOW_ELEMENTS": "its twin on CPUs is small",
    "pretrain.planning.bytes.memory.CHUNK_BYTES": "a plan's copy of the engine's",
    "pretrain.planning.bytes.memory.ITEM_BYTES": "a plan's copy of the engine's",
    "pretrain.planning.bytes.memory.WINDOW_ELEMENTS": "a plan's copy of the engine's",
    "pretrain.planning.bytes.row_bytes.WINDOW_ELEMENTS": "a plan's copy of the engine's",
}


def constants() -> Iterator[str]:
    """Names of what bounds the chunks of a loop, with their modules."""
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            # Studies' own loops are run by studies; code of an exported folder is imported under other names.
            if {"bench", "studies", "maintenance", "tests", "build", "remote_code"} & set(path.parts):
                continue
            module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                for name in (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)):
                    if OF_CHUNKS.search(f"_{name}") and name.isupper():
                        yield f"{module}.{name}"


def test_every_chunk_is_small_in_some_test() -> None:
    listed = {
        f"{module}.{name}"
        for chunks in (CHUNKS, OF_STEPS, OF_THE_LABORATORY)
        for module, names in chunks.items()
        for name in names
    }
    found = set(constants())
    assert len(found) > 25
    assert found - listed - SET_BY_A_TEST.keys() - AS_THEY_ARE.keys() == set()
    assert (SET_BY_A_TEST.keys() | AS_THEY_ARE.keys()) - found == set()
    for constant, test in SET_BY_A_TEST.items():
        assert constant.rpartition(".")[2] in (REPOSITORY / "tests" / test).read_text(encoding="utf-8"), constant
