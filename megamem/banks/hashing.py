"""Keys of the counter-based generator and of the keyed shuffle, whose hash is `kernels.common.hashing.mix`."""

from __future__ import annotations

import hashlib


def key_of(seed: int, *names: str) -> int:
    """A 63-bit key that depends on the seed and every name."""
    digest = hashlib.sha256("\0".join((str(seed), *names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
