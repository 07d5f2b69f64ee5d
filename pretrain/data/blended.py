"""Several streams of samples as one, by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from parallel.machine.atomic_write import atomic_write
from pretrain.data.computed import ComputedBlend
from pretrain.data.index_files import Array, open_index

_BLEND_FORMAT = 1


class BlendIndex:
    """Stream of each sample of a blend, and its number there: 10 bytes per sample, on disk.

    Sample i is of the stream that is farthest behind its share of i samples, so a longer blend begins with the shorter
    one, and the streams are served in their own order.

    Attributes:
        num_samples: samples of each stream.
    """

    def __init__(self, weights: Sequence[float], num_samples: int, folder: Path, *, checked: bool = True) -> None:
        """Open the index of so many samples, or make it.

        Args:
            weights: weights of the streams, in any unit.
            folder: folder in which it is kept.
            checked: hold it against its hashes, which one process of a machine does.

        Raises:
            DataError: the index cannot be kept there.
        """
        total = np.sum(np.array(weights, dtype=np.float64))
        shares = [float(weight / total) for weight in np.array(weights, dtype=np.float64)]

        def make(paths: list[Path]) -> None:
            _make(paths, shares, num_samples)

        key = hashlib.sha256(repr((_BLEND_FORMAT, shares, num_samples)).encode()).hexdigest()[:32]
        names = ("blend-streams", "blend-numbers", "blend-counts")
        self._streams, self._numbers, counts = open_index(folder, key, names, make, "the blend", checked=checked)
        self.num_samples: list[int] = counts.tolist()

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The stream of a sample, and its number there."""
        return int(self._streams[index]), int(self._numbers[index])


class BlendedSamples:
    """The samples of several streams, in the order of a blend."""

    def __init__(self, index: BlendIndex | ComputedBlend, streams: Sequence[Any]) -> None:
        self._index, self._streams = index, streams

    def __getitem__(self, index: int) -> dict[str, Any]:
        stream, number = self._index[index]
        sample: dict[str, Any] = self._streams[stream][number]
        return sample


def _make(paths: list[Path], shares: list[float], num_samples: int) -> None:
    from megatron.core.datasets import helpers

    with ExitStack() as stack:
        files = [stack.enter_context(atomic_write(path)) for path in paths]
        # Filled where they lie: a run of trillions of tokens has gigabytes of them.
        streams, numbers = (
            open_memmap(file.name, mode="w+", dtype=dtype, shape=(num_samples,))
            for file, dtype in zip(files, (np.int16, np.int64), strict=False)
        )
        helpers.build_blending_indices(streams, numbers, shares, len(shares), num_samples, False)
        for array in (streams, numbers):
            array.flush()
        np.save(files[2], _counts(streams, numbers, len(shares)), allow_pickle=False)


def _counts(streams: Array, numbers: Array, num_streams: int, part: int = 1 << 22) -> Array:
    """Samples of each stream, [num_streams] int64; the arrays are read in parts, from their end."""
    counts = np.zeros(num_streams, dtype=np.int64)
    for end in range(len(streams), 0, -part):
        chosen, number = streams[max(0, end - part) : end], numbers[max(0, end - part) : end]
        np.maximum.at(counts, chosen, number + 1)
        if counts.all():
            break
    return counts
