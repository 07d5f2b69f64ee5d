"""Training samples over prepared data sets, and blends of them, in one of two orders (`data.shuffle`).

`samples` is computed (`computed.py`). `documents` is an index over Megatron's `GPTDataset`: we keep Megatron's storage,
compiled index code and item format, and replace how a data set is ordered and blended, for these reasons:

- Megatron's order depends on the number of samples asked for, so lengthening a run would reshuffle the data under a
  checkpoint. Here sample i depends on the seed, the sequence length and i alone.
- Its index cache is keyed by the path, so it survives a data set that was prepared anew. Here the key is the content.
- A cache file that a killed run left half-written counts as whole there. Here files appear complete.
- Its ranks wait for the one that builds in a collective, which ends after minutes, and with our order, which Megatron's
  cache cannot hold, each would keep the blend's index in its own memory. Here all indices are mapped from disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from megamem.attention.documents import document_positions
from parallel.machine.atomic_write import atomic_write
from parallel.processes.ranks import current_ranks
from parallel.processes.turns import in_turns
from pretrain.config.fields import Shuffle
from pretrain.config.schema import DatasetEntry
from pretrain.data.blend import MOST_DOCUMENTS, check_epochs, check_fits
from pretrain.data.blended import BlendedSamples, BlendIndex
from pretrain.data.computed import ComputedBlend, ComputedSamples
from pretrain.data.index_files import open_index
from pretrain.data.manifest import TRAIN, open_dataset, vocabulary_error
from pretrain.data.scored import ScoredTokens
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

_INDEX_FORMAT = 1
_DOCUMENT_STREAM, _SAMPLE_STREAM = 0, 1
_SAMPLES_LOOKED_AT = 256
"""Samples before a run among which there must be a target."""


@dataclass
class StreamConfig(GPTDatasetConfig):
    """Megatron's data set configuration, with what our order and its cache need."""

    index_folder: Path = Path()
    """Folder of index arrays, kept between runs and shared between ranks."""
    checks_index: bool = True
    """True if this rank holds index arrays against their hashes: one of a machine does."""
    content_fingerprints: dict[str, str] = field(default_factory=dict)
    """Content fingerprint of the prepared data set behind each path prefix."""
    scored: dict[str, ScoredTokens] = field(default_factory=dict)
    """Tokens that count in the loss, by path prefix, where some of a data set do not."""


class StreamDataset(GPTDataset):
    """Fixed-length samples from an endless, reshuffled stream of documents.

    Every epoch holds each document once, in an order of its own; samples are cut from the concatenated epochs without a
    gap, and are served in passes of one epoch's worth, each shuffled in itself. All of it is a function of (seed,
    position), so a longer stream begins with the shorter one.
    """

    config: StreamConfig

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Megatron's sample, whose `loss_mask` is 0 where the label is not scored."""
        sample: dict[str, torch.Tensor] = super().__getitem__(idx)
        if idx is not None and self.dataset_path in self.config.scored:
            # Those of the sample's ids but the first, as each is the label of the one before it.
            scored = np.concatenate(list(self._scored(idx)))[1:]
            sample["loss_mask"] = torch.from_numpy(scored.astype(np.float32))
        return sample

    def _scored(self, idx: int) -> Iterator[NDArray[np.bool_]]:
        """Flags of a sample's ids, True where an id is scored, document by document."""
        scored, index = self.config.scored[self.dataset_path], self.dataset.index
        number = self.shuffle_index[idx]
        (first, start), (last, end) = self.sample_index[number], self.sample_index[number + 1]
        for place in range(first, last + 1):
            document = self.document_index[place]
            low = int(start) if place == first else 0
            # The sample's last id is the first one of the next.
            high = int(end) + 1 if place == last else int(self.dataset.sequence_lengths[document])
            begin = int(index.sequence_pointers[document]) // index.dtype_size
            yield scored.flags(begin + low, begin + high)

    def _build_document_sample_shuffle_indices(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Documents [epochs x documents], start of each sample in them [n + 1, 2], and the served order [n]."""

        def make(paths: list[Path]) -> None:
            for path, array in zip(paths, self._build_indices(), strict=True):
                with atomic_write(path) as stream:
                    np.save(stream, array, allow_pickle=False)

        names = ("documents", "samples", "order")
        folder = self.config.index_folder
        documents, samples, order = open_index(
            folder, self._index_key(), names, make, self.dataset_path, checked=self.config.checks_index
        )
        return documents, samples, order

    def _index_key(self) -> str:
        parts = (
            _INDEX_FORMAT,
            self.config.content_fingerprints[self.dataset_path],
            self.index_split.name,
            self.config.sequence_length,
            self.config.random_seed,
            self._num_passes(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _samples_per_pass(self) -> int:
        return (self._get_num_tokens_per_epoch() - 1) // self.config.sequence_length

    def _num_passes(self) -> int:
        return max(1, -(-self.num_samples // self._samples_per_pass()))

    def _build_indices(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        from megatron.core.datasets import helpers

        tokens_per_epoch = self._get_num_tokens_per_epoch()
        per_pass, num_passes = self._samples_per_pass(), self._num_passes()
        num_samples = per_pass * num_passes
        num_epochs = -(-(num_samples * self.config.sequence_length + 1) // tokens_per_epoch)
        if num_epochs * len(self.indices) > MOST_DOCUMENTS:
            raise DataError(
                f"{self.dataset_path}: {num_epochs} epochs of {len(self.indices)} documents are more than Megatron's "
                "index holds (2^31). Train fewer steps, or split the data set into several entries of the blend."
            )
        documents = np.concatenate(
            [self._random(_DOCUMENT_STREAM, epoch).permutation(self.indices) for epoch in range(num_epochs)]
        ).astype(np.int32)
        samples = helpers.build_sample_idx(
            np.array(self.dataset.sequence_lengths),
            documents,
            self.config.sequence_length,
            num_epochs,
            tokens_per_epoch,
        )
        order = np.concatenate(
            [
                self._random(_SAMPLE_STREAM, index).permutation(per_pass) + index * per_pass
                for index in range(num_passes)
            ]
        )
        return documents, samples[: num_samples + 1], order

    def _random(self, stream: int, index: int) -> np.random.RandomState:
        # RandomState, because its sequences are frozen across NumPy versions and Generator's are not.
        seed = self.config.random_seed
        return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, stream, index])

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[NDArray[Any], NDArray[Any], *tuple[Any, ...]]:
        """A sample's ids [sequence_length + 1] int64, its documents, and what else Megatron tells itself.

        Raises:
            DataError: the data holds an id outside the vocabulary; it must not reach the model, where it would index
                other memory.
        """
        ids, documents, *rest = super()._query_document_sample_shuffle_indices(idx)
        vocab_size = self.config.tokenizer.vocab_size
        if ids.max() >= vocab_size or ids.min() < 0:
            raise vocabulary_error(f"{self.dataset_path}: document", self.dataset, documents, vocab_size)
        return ids, documents, *rest


Streams = Sequence[dict[str, Any]] | BlendedSamples | ComputedSamples


class TrainDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A run's samples: `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32), each [sequence_length]."""

    def __init__(self, samples: Streams, num_samples: int, eod: int | None = None) -> None:
        """Take the first samples of a stream.

        Args:
            eod: the id at which positions start anew; None: at no id.
        """
        self._samples = samples
        self._num_samples = num_samples
        self._eod = eod

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        sample = dict(self._samples[index])
        if self._eod is not None:
            sample["position_ids"] = document_positions(sample["tokens"], self._eod)
        return sample


def build_train_dataset(
    entries: Sequence[DatasetEntry],
    *,
    sequence_length: int,
    num_samples: int,
    seed: int,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    shuffle: Shuffle = "documents",
    separate_documents: bool = False,
) -> TrainDataset:
    """The training samples of a blend. Called on every rank when torch.distributed is initialised.

    Sample i depends on the blend, the seed, the sequence length, `shuffle` and i, and not on `num_samples` or on the
    number of ranks. Tokens that end a document count in the loss; prompts, and what others than the assistant say, do not.

    Args:
        num_samples: samples that the run consumes in all.
        tokenizer: the one that `check_blend` returned.
        cache_dir: folder for index arrays, shared or local to each node.
        shuffle: documents, by an index that is made first; or samples, by a closed form.
        separate_documents: positions start anew at every document.

    Raises:
        DataError: a data set that does not open or is too short for a sample, or a cache that cannot be written.
        ConfigError: more samples than the epochs of the entries allow.
    """
    datasets = [open_dataset(entry.path) for entry in entries]
    for dataset in datasets:
        check_fits(dataset, sequence_length)
    shares = check_epochs(entries, datasets, sequence_length, num_samples)
    eod = tokenizer.eod if separate_documents else None
    if shuffle == "samples":
        computed = [
            ComputedSamples(dataset, TRAIN, sequence_length, seed, number) for number, dataset in enumerate(datasets)
        ]
        blended = BlendedSamples(ComputedBlend(shares.weights, seed), computed) if len(computed) > 1 else computed[0]
        return TrainDataset(blended, num_samples, eod)
    # Opened first, for their checks: nothing is built for data that cannot be read.
    files = [dataset.open_split(TRAIN) for dataset in datasets]
    prefixes = [dataset.prefix(TRAIN) for dataset in datasets]
    ranks = current_ranks()
    is_first_of_machine = ranks is None or ranks.local_rank == 0
    config = StreamConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        # For Megatron's checks: nothing else reads it.
        blend_per_split=[(prefixes, None), None, None],
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        index_folder=Path(cache_dir),
        checks_index=is_first_of_machine,
        content_fingerprints=dict(
            zip(prefixes, (dataset.manifest.content_fingerprint for dataset in datasets), strict=True)
        ),
        scored={
            prefix: scored
            for prefix, dataset in zip(prefixes, datasets, strict=True)
            if (scored := dataset.open_scored(TRAIN)) is not None
        },
    )

    def stream(number: int, num_samples: int) -> StreamDataset:
        documents = np.arange(len(files[number]), dtype=np.int32)
        return StreamDataset(files[number], prefixes[number], documents, max(1, num_samples), Split.train, config)

    def build() -> Sequence[dict[str, Any]] | BlendedSamples:
        if len(entries) == 1:
            return stream(0, num_samples)
        index = BlendIndex(shares.weights, num_samples, config.index_folder, checked=is_first_of_machine)
        return BlendedSamples(index, [stream(number, count) for number, count in enumerate(index.num_samples)])

    samples = in_turns(build, is_first_of_machine=is_first_of_machine)
    return TrainDataset(samples, num_samples, eod)


def check_targets(samples: TrainDataset, first: int, with_unscored: Sequence[Path]) -> None:
    """Refuse samples without a target, which a run would read without learning anything.

    Args:
        first: number of the next sample.
        with_unscored: data sets of which some tokens are not scored; without one every token is a target.

    Raises:
        DataError: none of the next samples has a target.
    """
    looked_at = range(first, min(len(samples), first + _SAMPLES_LOOKED_AT))
    if not with_unscored or not looked_at or any(bool(samples[index]["loss_mask"].any()) for index in looked_at):
        return
    raise DataError(
        f"The next {len(looked_at):,} samples of {len(samples[first]['tokens']):,} tokens have no target: they lie within "
        f"prompts, or others' turns, of {', '.join(map(str, with_unscored))}, which are not scored. Raise "
        "train.sequence_length, shorten these, or train for more steps."
    )
