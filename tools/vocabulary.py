"""Models whose vocabulary is left to a tokenizer, where there is none."""

from __future__ import annotations

from dataclasses import replace

from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError


def with_vocabulary(config: RunConfig, num_ids: int) -> RunConfig:
    """The configuration with a vocabulary: its own, or that of its memory of tokens, or else so many ids."""
    model = config.model
    vocab_size = model.vocab_size or getattr(model.memory, "vocab_size", None) or num_ids
    return replace(config, model=replace(model, vocab_size=vocab_size))


def check_has_vocabulary(config: RunConfig, path: str) -> None:
    """Refuse the configuration of a file that leaves its vocabulary to a tokenizer, which the command does not read.

    Raises:
        ConfigError: it does.
    """
    if config.model.vocab_size is None:
        raise ConfigError(f"{path} leaves model.vocab_size to the tokenizer: set it, as in model.vocab_size=50304")
