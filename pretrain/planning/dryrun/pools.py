"""Memory that PyTorch's caching allocator takes of a device on which several streams allocate.

A block belongs to the stream that was current when it was allocated, and goes back to that stream's pool: what one
stream has freed, another cannot have (c10/cuda/CUDACachingAllocator.cpp, 2.11 to 2.13). So the device must have room
for each pool at its largest, whenever that is. A block that `record_stream` has announced to another stream comes back
only when that stream is past its end, as the host sees it; and the host is ahead of the device.

It is what a step takes without a pause. Where the device has no more, the allocator waits for it, gives back what is
wholly free of every pool, and asks again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from pretrain.planning.bytes.launches import LAUNCHES_AHEAD


@dataclass
class _Block:
    """A storage that is in use.

    Attributes:
        pool: the stream that it was allocated on.
        announced: other streams that use it.
    """

    pool: str
    num_bytes: int
    announced: set[str] = field(default_factory=set)


class StreamPools:
    """Bytes of each stream's pool, now and at its largest."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._bytes: Counter[str] = Counter()
        self._most: Counter[str] = Counter()
        self._num_launches = 0
        # Blocks that were freed while another stream may still have used them: at which launch, pool and bytes.
        self._delayed: deque[tuple[int, str, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools, each at its largest since `restart`."""
        return sum(self._most.values())

    def restart(self) -> None:
        """Forget how large the pools were before."""
        self._most = self._bytes.copy()

    def allocate(self, storage: int, num_bytes: int, stream: str) -> None:
        """Take a block for a storage from a stream's pool."""
        self._blocks[storage] = _Block(stream, num_bytes)
        self._add(stream, num_bytes)

    def announce(self, storage: int, stream: str) -> None:
        """Say that a stream uses a storage."""
        if (block := self._blocks.get(storage)) is not None and stream != block.pool:
            block.announced.add(stream)

    def free(self, storage: int) -> None:
        """Give a storage's block back, or have it wait for the streams that use it."""
        if (block := self._blocks.pop(storage, None)) is None:
            return
        if block.announced:
            self._delayed.append((self._num_launches, block.pool, block.num_bytes))
        else:
            self._add(block.pool, -block.num_bytes)

    def launch(self) -> None:
        """Count a launch: what was freed long enough ago comes back."""
        self._num_launches += 1
        while self._delayed and self._delayed[0][0] + LAUNCHES_AHEAD <= self._num_launches:
            _, pool, num_bytes = self._delayed.popleft()
            self._add(pool, -num_bytes)

    def _add(self, pool: str, num_bytes: int) -> None:
        self._bytes[pool] += num_bytes
        self._most[pool] = max(self._most[pool], self._bytes[pool])
