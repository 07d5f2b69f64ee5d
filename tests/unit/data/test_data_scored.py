"""Files that say which tokens are scored, against the flags that were written."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.indexed_files import IndexedWriter, document_starts, read_written
from pretrain.data.scored import ScoredFile, open_scored, runs_of, scored_file_bytes, scored_path


@st.composite
def documents(draw: st.DrawFn) -> list[list[bool]]:
    lengths = st.integers(1, 40)
    return draw(st.lists(lengths.flatmap(lambda length: st.lists(st.booleans(), min_size=length, max_size=length))))


@pytest.mark.parametrize("kind", get_args(ScoredFile))
@settings(max_examples=60, deadline=None)
@given(flags=documents(), noted=st.integers(0, 12), ranges=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90))))
def test_flags_are_those_that_were_written(
    kind: ScoredFile, flags: list[list[bool]], noted: int, ranges: list[tuple[int, int]]
) -> None:
    """A writer goes on from any document that was noted, whatever was written behind it."""
    if kind == "prompts":
        # Those that are not scored are the first.
        flags = [sorted(each) for each in flags]
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "train"
        with IndexedWriter(prefix, np.uint16, scoring=kind) as writer:
            written = writer.sync()
            for number, each in enumerate(flags):
                writer.add(np.arange(len(each)), 3 * len(each), np.array(each), number)
                if number + 1 == noted:
                    written = writer.sync()
        before = written.num_documents
        with IndexedWriter(prefix, np.uint16, written, scoring=kind) as writer:
            for number, each in enumerate(flags[before:], start=before):
                writer.add(np.arange(len(each)), 3 * len(each), np.array(each), number)
            everything = np.concatenate([*map(np.array, flags), np.zeros(0, bool)]).astype(bool)
            if flags:
                writer.sync()
                again = list(read_written(prefix, np.uint16, kind))
                assert [each.scored.tolist() for each in again if each.scored is not None] == flags
                assert [each.unscored_bytes for each in again] == list(range(len(flags)))
            writer.finish()
            assert writer.written.unscored_tokens == int((~everything).sum())
            assert writer.written.unscored_bytes == sum(range(len(flags)))
        num_bytes = scored_path(prefix, kind).stat().st_size
        assert num_bytes == scored_file_bytes(kind, len(flags), len(everything))
        scored = open_scored(prefix, kind, document_starts(prefix.with_name("train.idx")), unit=2)
        for start, stop in [(0, len(everything)), *ranges]:
            start, stop = sorted((min(start, len(everything)), min(stop, len(everything))))
            if start < stop:
                assert scored.flags(start, stop).tolist() == everything[start:stop].tolist()
            assert scored.count(stop) == int(everything[:stop].sum())
    assert [place for run in runs_of(everything) for place in range(*run)] == np.flatnonzero(everything).tolist()
