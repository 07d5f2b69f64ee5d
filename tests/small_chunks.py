"""Chunks that work is done in, made so small that tests reach a second one, and a last one that is not full.

A loop over windows of four million elements runs once in a test, whatever it does to the second. Chunks that sums depend on
are not among these: commands in processes of their own, of Slurm's, would add up otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

Chunks = Mapping[str, Mapping[str, int]]

CHUNKS: Chunks = {
    "pretrain.checkpoint.hashes": {"_READ_BYTES": 1000},
    "pretrain.checkpoint.store.torch_dist_writer": {"MAX_PART_BYTES": 5000},
    "pretrain.checkpoint.store.lazy_tensor": {"_SPAN_BYTES": 1000, "_WORTH_A_SEEK_BYTES": 30},
    "pretrain.convert.huggingface.quantised": {"_ELEMENTS_AT_A_TIME": 30},
    "pretrain.convert.resources": {"_LARGEST_PIECE_BYTES": 2000},
    "pretrain.data.columns": {"_ROWS_PER_READ": 2},
    "pretrain.data.contents": {"_READ_BYTES": 1000},
    "pretrain.data.indexed_files": {"_DOCUMENTS_AT_ONCE": 3},
    "pretrain.data.manifest": {"_BYTES_AT_ONCE": 1000},
    "pretrain.data.scored": {"_BYTES_AT_ONCE": 5},
    "pretrain.data.workers": {"_MAX_BATCH_BYTES": 2000, "_MAX_BATCH_RECORDS": 3},
    "pretrain.engine.tables.table_files": {"_ROWS_OF_A_READER": 5},
    "pretrain.checkpoint.store.torch_zip": {"_READ_BYTES": 1000},
    "pretrain.evaluation.stored_tables": {"_BLOCK_ELEMENTS": 100},
    "pretrain.patch.changes": {"_ELEMENTS_AT_ONCE": 40},
    "pretrain.patch.file": {"_READ_BYTES": 1000},
    "pretrain.patch.merge": {"_ROWS_AT_ONCE": 3},
}
"""Constants by module, and what they are in all tests."""

OF_STEPS: Chunks = {
    "kernels.common.slices": {"_SLICE_ELEMENTS": 100},
    "pretrain.engine.tables.bf16_gradients": {"_WINDOW_ELEMENTS_ON_CPU": 600},
    "pretrain.engine.tables.replica_rows": {"_WINDOW_ELEMENTS_ON_CPU": 600},
    "pretrain.engine.tables.stored_tables": {"_ROWS_AT_A_TIME": 50},
    "pretrain.train.health.replicas": {"PART_ELEMENTS": 100},
}
"""Constants of a training step, small in tests of ranks alone: dry runs take steps with tables of their full size."""

TILES: Chunks = {"kernels.common.tiles": {"_MAX_COLUMNS": 8, "_MAX_RUN_COLUMNS": 8, "_PRODUCT_STEPS": 1}}
"""Columns that a program of Triton's kernels has at once, and tiles that it goes over, few in their tests: rows of tests are
narrower than theirs."""


@contextmanager
def small(chunks: Chunks) -> Iterator[None]:
    """Set the constants in this process, from which ranks and commands are forked."""
    with pytest.MonkeyPatch.context() as patch:
        for name, constants in chunks.items():
            module = importlib.import_module(name)
            for constant, size in constants.items():
                assert getattr(module, constant) > size, f"{name}.{constant} is small already"
                patch.setattr(module, constant, size)
        yield
