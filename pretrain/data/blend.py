"""What the data sets of a configuration have in common. Nothing here is slow: a command looks before it starts ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megamem.config import ModelConfig
from pretrain.config.schema import DatasetEntry
from pretrain.data.manifest import TRAIN, PreparedDataset, open_dataset
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError, DataError


def check_blend(entries: Sequence[DatasetEntry]) -> Tokenizer:
    """The tokenizer that the data sets of a blend share; see `open_blend`."""
    return open_blend(entries)[0].tokenizer


def open_blend(entries: Sequence[DatasetEntry]) -> list[PreparedDataset]:
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


def _describe(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size} ids, {tokenizer.fingerprint[:12]}"


def check_fits(dataset: PreparedDataset, sequence_length: int) -> None:
    """Refuse a data set with less than one sample.

    Raises:
        DataError: naming the longest sequence that it has.
    """
    num_tokens = dataset.manifest.splits[TRAIN].num_tokens
    if num_tokens < sequence_length + 1:
        raise DataError(
            f"{dataset.path} has {num_tokens} training tokens, and a sequence of {sequence_length} needs "
            f"{sequence_length + 1}. Lower train.sequence_length to {max(1, num_tokens - 1)} or less, "
            "or prepare more data."
        )


def model_vocab_size(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Token ids of the embedding before padding.

    Raises:
        ConfigError: model.vocab_size is set and smaller than the tokenizer's.
    """
    if model.vocab_size is None:
        return tokenizer.vocab_size
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size}, but the data sets' tokenizer has {tokenizer.vocab_size} ids: "
            "raise it, or leave it out"
        )
    return model.vocab_size
