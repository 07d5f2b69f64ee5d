"""Tokenizer, shares and limits of a blend of data sets. Nothing here is slow: commands check before ranks start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megamem.config.model import ModelConfig
from pretrain.config.schema import DatasetEntry, EvaluationEntry
from pretrain.data.manifest import TRAIN, PreparedDataset, open_dataset
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError, DataError

MOST_DOCUMENTS = 2**31 - 1
"""Most documents, over all epochs, in an order that Megatron's index holds."""


def check_blend(entries: Sequence[DatasetEntry | EvaluationEntry]) -> Tokenizer:
    """The tokenizer that the data sets of a blend share; see `open_blend`."""
    return shared_tokenizer(open_blend(entries))


def shared_tokenizer(datasets: Sequence[PreparedDataset]) -> Tokenizer:
    """The tokenizer of data sets that have one in common. It takes special tokens if it did for any of them, and has the
    chat template of the first that has one."""
    chat = next((each.tokenizer.chat for each in datasets if each.tokenizer.chat is not None), None)
    known = next((each.tokenizer for each in datasets if each.tokenizer.special_tokens), datasets[0].tokenizer)
    return known if chat == known.chat else known.taking_special_tokens(chat)


def open_blend(entries: Sequence[DatasetEntry | EvaluationEntry]) -> list[PreparedDataset]:
    """Open every data set of a blend, of which there is at least one.

    Raises:
        DataError: no data sets, one that does not open, or different tokenizers.
    """
    if not entries:
        raise DataError("The configuration names no data. List prepared data sets under data.datasets.")
    first, *others = [open_dataset(entry.path) for entry in entries]
    for other in others:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise DataError(
                f"{other.path} and {first.path} were made with different tokenizers "
                f"({_describe(other.tokenizer)} and {_describe(first.tokenizer)}). Prepare both with the same one."
            )
    return [first, *others]


def domain_names(entries: Sequence[DatasetEntry | EvaluationEntry]) -> list[str]:
    """The domain of each entry: its name, or the end of its path, or all of it where two different paths end alike."""
    ends = {entry.path: Path(entry.path).name for entry in entries if entry.name is None}
    taken = [*ends.values(), *{entry.name for entry in entries if entry.name is not None}]
    of_path = {path: end if taken.count(end) == 1 else path for path, end in ends.items()}
    return [of_path[entry.path] if entry.name is None else entry.name for entry in entries]


def _describe(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size} ids, {tokenizer.fingerprint[:12]}"


def check_fits(dataset: PreparedDataset, sequence_length: int) -> None:
    """Refuse a data set with less than one sample.

    Raises:
        DataError: the data set is too short; the message names the longest sequence that it has.
    """
    num_tokens = dataset.manifest.splits[TRAIN].num_tokens
    if num_tokens < sequence_length + 1:
        raise DataError(
            f"{dataset.path} has {num_tokens} training tokens, and a sequence of {sequence_length} needs "
            f"{sequence_length + 1}. Lower train.sequence_length to {max(1, num_tokens - 1)} or less, "
            "or prepare more data."
        )


@dataclass(frozen=True)
class Shares:
    """Weights of a blend, and the most samples that it allows.

    Attributes:
        weights: weights of its data sets, in one unit.
        most_samples: samples of a run in which every data set is read as often as it may be; None: no limit.
    """

    weights: tuple[float, ...]
    most_samples: int | None


def blend_shares(entries: Sequence[DatasetEntry], datasets: Sequence[PreparedDataset], sequence_length: int) -> Shares:
    """Shares of the entries, by weight or by epochs.

    Args:
        datasets: data sets of the entries, in their order; all of them hold a sample.
    """
    if any(entry.epochs is None for entry in entries):
        return Shares(tuple(entry.weight for entry in entries), None)
    samples = [
        # As the stream of a data set is shuffled: in passes of whole samples, each of which needs the token after it.
        (entry.epochs or 0) * ((dataset.manifest.splits[TRAIN].num_tokens - 1) // sequence_length)
        for entry, dataset in zip(entries, datasets, strict=True)
    ]
    # A sum of floats may lie below the number that was meant.
    return Shares(tuple(samples), math.floor(sum(samples) + 1e-6))


def check_epochs(
    entries: Sequence[DatasetEntry], datasets: Sequence[PreparedDataset], sequence_length: int, num_samples: int
) -> Shares:
    """The shares of a blend, after refusing a run that is longer than its epochs.

    Raises:
        ConfigError: the run is too long; the message says how many samples there are, and how long the run may be.
    """
    shares = blend_shares(entries, datasets, sequence_length)
    if shares.most_samples is not None and num_samples > shares.most_samples:
        of_sets = ", ".join(
            f"{entry.epochs:g} x {dataset.manifest.splits[TRAIN].num_tokens:,} tokens of {entry.path}"
            for entry, dataset in zip(entries, datasets, strict=True)
        )
        raise ConfigError(
            f"the run reads {num_samples:,} samples of {sequence_length} tokens, and the epochs of data.datasets allow "
            f"{shares.most_samples:,} ({of_sets}): lower train.num_steps to {shares.most_samples} / "
            "train.global_batch_size or less, or raise the epochs"
        )
    return shares


def check_document_order(
    entries: Sequence[DatasetEntry], datasets: Sequence[PreparedDataset], sequence_length: int, num_samples: int
) -> None:
    """Refuse a run whose order of documents is longer than Megatron's index of them.

    Raises:
        ConfigError: the order is too long; the message names the data set, and what can be changed.
    """
    shares = blend_shares(entries, datasets, sequence_length)
    for weight, dataset in zip(shares.weights, datasets, strict=True):
        split = dataset.manifest.splits[TRAIN]
        num_tokens = num_samples * weight / sum(shares.weights) * sequence_length
        num_documents = num_tokens / split.num_tokens * split.num_documents
        if num_documents > MOST_DOCUMENTS:
            raise ConfigError(
                f"train.num_steps asks for {num_tokens:.3g} tokens of {dataset.path}, {num_documents:.3g} documents one after "
                f"the other, and an order of documents has {MOST_DOCUMENTS:,} at most: lower it, or take "
                "data.shuffle=samples, which keeps no order"
            )


def model_vocab_size(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Token ids of the embedding before padding.

    Raises:
        ConfigError: model.vocab_size is set and smaller than the tokenizer's, or a memory has no rows for some ids.
    """
    if model.vocab_size is None:
        try:
            replace(model, vocab_size=tokenizer.vocab_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return tokenizer.vocab_size
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size}, but the data sets' tokenizer has {tokenizer.vocab_size} ids: "
            "raise it, or leave it out"
        )
    return model.vocab_size
