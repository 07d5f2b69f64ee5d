"""The fixed permutation of a grid's entries that breaks the row/column topology of a product grid (Eq. 8).

Neighbouring entries of a grid share a row or a column key, so without a shuffle they would be retrieved together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.hashing import key_of, mix

_ROUNDS = 4


class KeyedShuffle:
    """A stateless bijection of an N x N grid: a Feistel network whose halves are added modulo N.

    Each round replaces (i, j) by (j, (i + F(j)) mod N) with F a keyed hash; that is invertible for every N, needs no
    table, no loop that depends on the data and no host sync. A stored permutation would cost 8 bytes per entry and
    layer.

    Attributes:
        round_keys: of F in each round, which with `num_keys` are all there is to it.
    """

    def __init__(self, num_keys: int, *, seed: int, name: str) -> None:
        self.num_keys = num_keys
        self.round_keys = tuple(key_of(seed, name, "shuffle", str(r)) for r in range(_ROUNDS))

    def __call__(self, entries: Tensor) -> Tensor:
        """Permuted entries.

        Args:
            entries: int64 in [0, num_keys^2), any shape.

        Returns:
            int64 of the same shape, in the same range.
        """
        i, j = entries // self.num_keys, entries % self.num_keys
        for key in self.round_keys:
            # Bits 1..63 of the hash: int64 remainders of negative numbers would still be in range, but cost a
            # correction.
            i, j = j, (i + ((mix(j, key) >> 1) & 0x3FFFFFFFFFFFFFFF) % self.num_keys) % self.num_keys
        return i * self.num_keys + j


def random_permutation(num_entries: int, *, seed: int, name: str) -> Tensor:
    """The released layers' shuffle, for weights trained with it: a stored permutation of [0, num_entries), int64."""
    hashes = mix(torch.arange(num_entries, dtype=torch.int64), key_of(seed, name, "shuffle"))
    return torch.argsort(hashes, stable=True)
