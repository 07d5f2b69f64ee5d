"""An order of samples that costs nothing to start, whatever the size of the data: nothing is built, kept or read.

With `data.shuffle: samples` documents stay as they lie in their files, one behind the other. Each pass over a data set
is cut into samples, from a token of its own on, and serves them in an order of its own; the tokens of sample i are a
closed function of the seed, the pass and i. So is a blend. With `data.shuffle: documents` (`dataset.py`) an index
of all samples is made first.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from pretrain.data.manifest import PreparedDataset
from pretrain.data.permutation import mixed, permuted
from pretrain.errors import DataError

_OF_PASS, _OF_START, _OF_BLOCK = range(3)
_SMALLEST_BLOCK = 256


class ComputedSamples:
    """The samples of a data set, without end: those of pass after pass."""

    def __init__(self, dataset: PreparedDataset, split: str, sequence_length: int, seed: int, number: int) -> None:
        """Open the samples of a split.

        Args:
            dataset: a data set of at least one sample.
            number: number of the data set in its blend; each has an order of its own.
        """
        self._file = f"{dataset.prefix(split)}.bin"
        self._vocab_size = dataset.tokenizer.vocab_size
        self._stream = np.memmap(self._file, dataset.tokenizer.token_dtype, mode="r")
        self._scored = dataset.open_scored(split)
        self._length = sequence_length
        self._key = mixed(seed, number)
        # The last label of a pass is a token too.
        self._per_pass, self._left_over = divmod(len(self._stream) - 1, sequence_length)

    def start_of(self, index: int) -> int:
        """The number of a sample's first token in the file."""
        number_of_pass, place = divmod(index, self._per_pass)
        # The tokens left over lie before the first sample or behind the last: others in every pass.
        first = mixed(self._key, _OF_START, number_of_pass) % (self._left_over + 1)
        return first + self._length * permuted(place, self._per_pass, mixed(self._key, _OF_PASS, number_of_pass))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """A sample as of Megatron's `GPTDataset`, tensors [sequence_length]: `tokens`, `labels`, `position_ids` int64,
        `loss_mask` float32.

        Raises:
            DataError: the file holds an id outside of the vocabulary.
        """
        start = self.start_of(index)
        ids = self._stream[start : start + self._length + 1].astype(np.int64)
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            place = int(outside.argmax())
            raise DataError(
                f"{self._file}: token {start + place} has the id {ids[place]}, outside the vocabulary of "
                f"{self._vocab_size}. The data set is damaged or from another tokenizer: prepare it again."
            )
        tokens = torch.from_numpy(ids)
        # Those of the labels.
        scored = None if self._scored is None else self._scored.flags(start + 1, start + self._length + 1)
        return {
            "tokens": tokens[:-1].contiguous(),
            "labels": tokens[1:].contiguous(),
            "position_ids": torch.arange(self._length),
            "loss_mask": torch.ones(self._length) if scored is None else torch.from_numpy(scored).float(),
        }


class ComputedBlend:
    """Stream of each sample of a blend, and its number there.

    In blocks of `block` samples: of the first b blocks stream d has floor(share_d b block), and the stream with the
    largest share has the rest. Within a block the samples of all streams are shuffled, so that shares hold to the
    block, and in every batch as far as chance has it.

    Attributes:
        block: samples of a block.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Lay out a blend.

        Args:
            weights: weights of the streams, in any unit.
        """
        # A block in which even the largest share could be less than none would have no order.
        self.block = max(_SMALLEST_BLOCK, 1 << (len(weights) ** 2 - 1).bit_length())
        total = sum(map(Fraction, weights), Fraction(0))
        self._shares = [Fraction(weight) / total for weight in weights]
        self._largest = max(range(len(weights)), key=self._shares.__getitem__)
        self._seed = seed

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The stream of a sample, and its number there."""
        number_of_block, place = divmod(index, self.block)
        place = permuted(place, self.block, mixed(self._seed, _OF_BLOCK, number_of_block))
        before, behind = self.counts(number_of_block), self.counts(number_of_block + 1)
        for stream, (first, end) in enumerate(zip(before, behind, strict=True)):
            if place < end - first:
                return stream, first + place
            place -= end - first
        raise AssertionError("the counts of a block are its size")

    def counts(self, num_blocks: int) -> list[int]:
        """Samples of each stream in so many blocks."""
        found = [int(share * num_blocks * self.block) for share in self._shares]
        found[self._largest] += num_blocks * self.block - sum(found)
        return found
