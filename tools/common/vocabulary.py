"""Models whose vocabulary is left to a tokenizer, where there is one and where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError, MissingDataError

if TYPE_CHECKING:
    from pretrain.data.tokenizer import Tokenizer


def with_vocabulary_of(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The configuration with a vocabulary: its own, or that of its data's tokenizer.

    Raises:
        ConfigError: the configuration's own vocabulary is the smaller one, or a memory has no rows for some ids.
    """
    from pretrain.data.blend import model_vocab_size

    return _with(config, model_vocab_size(config.model, tokenizer))


def with_vocabulary(config: RunConfig, num_ids: int) -> RunConfig:
    """The configuration with a vocabulary: its own, or that of its memory of tokens, or else so many ids."""
    model = config.model
    return _with(config, model.vocab_size or getattr(model.memory, "vocab_size", None) or num_ids)


def with_vocabulary_of_data(config: RunConfig, path: str) -> RunConfig:
    """The configuration of a file with a vocabulary: its own, or that of its data sets' tokenizer, as training has it.

    Raises:
        ConfigError: the configuration leaves its vocabulary to a tokenizer, and its data sets are not here.
        DataError: the data sets are damaged, or have different tokenizers.
    """
    if config.model.vocab_size is not None:
        return config
    from pretrain.data.blend import check_blend

    lacking = "it names no data sets"
    if config.read_data:
        try:
            return with_vocabulary_of(config, check_blend(config.read_data))
        except MissingDataError as error:
            lacking = f"{error.folder} is not there"
    raise ConfigError(
        f"{path} leaves model.vocab_size to the tokenizer of its data, and {lacking}: prepare that, or set it, as in "
        "model.vocab_size=50304"
    )


def _with(config: RunConfig, vocab_size: int) -> RunConfig:
    return replace(config, model=replace(config.model, vocab_size=vocab_size))
