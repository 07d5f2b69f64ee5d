"""The fixed permutation of a grid's entries that breaks the row/column topology of a product grid (Eq. 8).

Neighbouring entries of a grid share a row or a column key, so without a shuffle they would be retrieved together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.hashing import mix
from kernels.shuffled_rows.naive import NUM_ROUNDS, shuffled
from megamem.banks.hashing import key_of


class KeyedShuffle:
    """A stateless bijection of an N x N grid, `kernels.shuffled_rows.naive.shuffled`.

    It needs no table, no loop that depends on the data and no host sync. A stored permutation would cost 8 bytes per
    entry and layer. Layers go from entries to rows in one op, `Kernels.shuffled_rows`.

    Attributes:
        round_keys: keys of F in each round, which with `num_keys` are all there is to it.
    """

    def __init__(self, num_keys: int, *, seed: int, name: str) -> None:
        self.num_keys = num_keys
        self.round_keys = tuple(key_of(seed, name, "shuffle", str(r)) for r in range(NUM_ROUNDS))

    def __call__(self, entries: Tensor) -> Tensor:
        """Permuted entries.

        Args:
            entries: int64 in [0, num_keys^2), any shape.

        Returns:
            int64 of the same shape, in the same range.
        """
        return shuffled(entries, self.num_keys, self.round_keys)


def random_permutation(num_entries: int, *, seed: int, name: str) -> Tensor:
    """The released layers' shuffle, for weights trained with it: a stored permutation of [0, num_entries), int64."""
    hashes = mix(torch.arange(num_entries, dtype=torch.int64), key_of(seed, name, "shuffle"))
    return torch.argsort(hashes, stable=True)
