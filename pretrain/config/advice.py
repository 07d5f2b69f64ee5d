"""Advice on configurations that run, and could run faster with another value; nothing is refused."""

from __future__ import annotations

from collections.abc import Iterator

from pretrain.config.schema import RunConfig

WIDE_LOAD_BYTES = 16
"""A row that is a multiple of this, from its first byte on, is read in the widest loads that a GPU has."""


def advice(config: RunConfig) -> Iterator[str]:
    """Sentences with key, value, consequence and the better value."""
    memory, group = config.model.memory, config.parallel.memory
    if memory is None:
        return
    element_bytes = config.train.element_bytes
    widths = {table.key: table.width for table in memory.tables}
    narrow = {key: width // group for key, width in widths.items() if width // group * element_bytes % WIDE_LOAD_BYTES}
    if not narrow:
        return
    parts = ", ".join(
        f"{columns} columns of model.memory.{key} ({columns * element_bytes} bytes)" for key, columns in narrow.items()
    )
    better = [
        size
        for size in range(1, group)
        if group % size == 0
        and all(width % size == 0 and width // size * element_bytes % WIDE_LOAD_BYTES == 0 for width in widths.values())
    ]
    multiple = group * WIDE_LOAD_BYTES // element_bytes
    fix = f"parallel.memory {better[-1]} or " if better else ""
    yield (
        f"parallel.memory {group} leaves every rank {parts} of a row, which is no multiple of {WIDE_LOAD_BYTES} bytes: "
        f"a GPU reads such rows in narrower loads. {fix}widths that are multiples of {multiple} keep the wide ones"
    )
