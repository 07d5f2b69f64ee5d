"""Documents within sequences: where each of them begins, and which scores of attention there are.

With `data.documents: separate` a document begins at the end-of-document token before it, which has position 0, and
attention does not reach back beyond it. So every token is predicted from its own document alone, the first one from that
token, as in generation. A document that a sequence's edge cuts begins anew with the sequence.

A microbatch carries the bounds: where each document begins in the tokens of all sequences one after the other, and
last their number, as cumulative lengths. They stay in host memory, so that no kernel is launched by numbers
that the host would wait for, and go to Megatron's attention as `attention_mask`, which is saved as an argument of what
is recomputed. Every context-parallel rank has those of the whole sequences.

Legend: b sequences, s tokens of a sequence over all context-parallel ranks, D documents of a microbatch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

DOCUMENT_BOUNDS = "document_bounds"
"""Their name in a microbatch."""


def document_positions(token_ids: Tensor, eod: int) -> Tensor:
    """Each token's place in its document: [..., s] int64, of token ids [..., s]."""
    places = torch.arange(token_ids.shape[-1], device=token_ids.device)
    starts = torch.where(token_ids == eod, places, 0).cummax(-1).values
    return places - starts


def document_bounds(positions: Tensor) -> Tensor:
    """[D + 1] int64 in host memory, of positions [b, s] in host memory that are 0 where a document begins."""
    begins = positions == 0
    begins[:, 0] = True
    # No Host sync: positions are in host memory.
    (starts,) = begins.flatten().nonzero(as_tuple=True)
    return torch.cat((starts, torch.tensor([positions.numel()])))


@dataclass(frozen=True)
class Slice:
    """Consecutive tokens of every sequence.

    Attributes:
        start: the first one's place in its sequence.
        stop: the place after the last one's.
        offset: the first one's place in a tensor that holds the slice.
    """

    start: int
    stop: int
    offset: int = 0

    def held(self, start: int, stop: int) -> slice:
        """Slice of the tensor that holds the tokens at `start` to `stop`."""
        return slice(start - self.start + self.offset, stop - self.start + self.offset)


@dataclass(frozen=True)
class ScoreTile:
    """Queries and keys between which no score is masked, or of which the same tokens are masked causally.

    Attributes:
        sequences: sequences that have the tokens.
        queries: their places in the tensor of queries.
        keys: their places in the tensor of keys.
        causal: both are the same tokens, each of which attends to itself and those before it.
    """

    sequences: slice
    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Documents:
    """Division of a microbatch's tokens into documents.

    Attributes:
        length: s.
        bounds: bounds of the documents in all sequences one after the other; None: every sequence is one document.
    """

    length: int
    bounds: tuple[int, ...] | None

    @staticmethod
    def of(bounds: Tensor | None, length: int) -> Documents:
        """Make the documents of the bounds [D + 1] that travel, and of the length s of a sequence."""
        # No Host sync: bounds are in host memory.
        return Documents(length, None if bounds is None else tuple(bounds.tolist()))

    def tiles(self, queries: Slice, keys: Slice) -> Iterator[ScoreTile]:
        """The scores that there are between two slices, which are equal or have no token in common; there may be none."""
        if keys.start >= queries.stop or keys.start == keys.stop:
            return
        causal = keys.start == queries.start
        assert keys.stop == queries.stop if causal else keys.stop <= queries.start
        for sequences, start, stop in self._reaching_into(queries):
            of_queries = max(start, queries.start), min(stop, queries.stop)
            of_keys = max(start, keys.start), min(stop, keys.stop)
            if of_keys[0] < of_keys[1]:
                yield ScoreTile(sequences, queries.held(*of_queries), keys.held(*of_keys), causal)

    def _reaching_into(self, part: Slice) -> Iterator[tuple[slice, int, int]]:
        """The documents of which a slice has tokens: their sequences, and where they begin and end in these."""
        if self.bounds is None:
            yield slice(None), 0, self.length
            return
        for sequence in range(self.bounds[-1] // self.length):
            before = sequence * self.length
            first = bisect_right(self.bounds, before + part.start) - 1
            last = bisect_left(self.bounds, before + part.stop)
            for index in range(first, last):
                start, stop = self.bounds[index] - before, self.bounds[index + 1] - before
                yield slice(sequence, sequence + 1), start, stop
