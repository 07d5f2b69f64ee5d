"""Memories that token ids or n-grams address: what a model refuses of them, and what follows from the number of token ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.memory import MemoryConfig
from megamem.config.model import LatentAttentionConfig, ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.ngram_embedding.config import NgramEmbeddingConfig
from megamem.families.residual_ngrams.config import ResidualNgramsConfig
from megamem.families.value_ngrams.config import ValueNgramsConfig
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from tests.plain_config import parse_config
from tools.tables import token_tables

BIGRAMS = NgramAddressConfig(num_rows=60)
MODEL = ModelConfig(
    num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, vocab_size=61
)
LATENTS = LatentAttentionConfig(latent_dim=12, rotary_dim=4)
VALUES: Any = {"value_dim": 16, "num_gate_heads": 2}


@pytest.mark.parametrize(
    ("memory", "change", "words"),
    [
        (
            ValueNgramsConfig(address=BIGRAMS, value_dim=16, into="one_head"),
            {},
            "1 rows have 16 columns, but into: one_head adds them to a head's 8",
        ),
        (ValueNgramsConfig(gate_channels=33), {}, "gate_channels is 33, but the stream has 32 columns"),
        (
            ValueNgramsConfig(),
            {"latent_attention": LATENTS, "num_query_groups": None},
            "kind is value_ngrams, which adds to the values of attention's heads",
        ),
        (
            MomeConfig(num_heads=2, value_dim=8),
            {"latent_attention": LATENTS, "num_query_groups": None},
            "kind is mome, which adds to the values of attention's heads",
        ),
        (MomeConfig(num_heads=4, value_dim=8), {}, "num_heads is 4, but attention has 2 key/value heads"),
        (MomeConfig(num_heads=2, value_dim=16), {}, "value_dim is 16, but rows are added to heads of 8 columns"),
        (
            ResidualNgramsConfig(value_dim=33),
            {},
            "value_dim is 33, but rows are added to the first columns of a residual",
        ),
    ],
)
def test_what_a_model_refuses(memory: MemoryConfig, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(MODEL, memory=memory, **change)


def test_an_embedding_has_no_other_place() -> None:
    assert NgramEmbeddingConfig().placement.blocks == (0,)
    with pytest.raises(ValueError, match="joins the input embedding, before block 0"):
        NgramEmbeddingConfig(placement=PlacementConfig(blocks=(1,)))


@pytest.mark.parametrize("config", [MoveConfig, LaveConfig, MomeConfig])
def test_rows_that_are_read_as_they_are_have_no_signs(config: Any) -> None:
    with pytest.raises(
        ValueError, match=r"address\.signs is ids, but kind \w+ reads its rows as they are: use signs: none"
    ):
        config(address=replace(BIGRAMS, signs="ids"))


def test_ids_beside_n_grams_are_a_model_of_two_families() -> None:
    second = EngramConfig(placement=PlacementConfig(blocks=(1,)))
    model = replace(MODEL, memory=LaveConfig(**VALUES), second_memory=second)
    assert model.memory_kinds == "lave and engram"


def test_a_base_is_the_number_of_token_ids() -> None:
    """Rows do not depend on it; multipliers do."""
    address = NgramAddressConfig(rules="polynomial", max_order=3, num_rows=50)
    model = replace(MODEL, memory=NgramEmbeddingConfig(address=address))
    (layer,) = model.memory_layers
    assert isinstance(layer.memory, NgramEmbeddingConfig)
    assert layer.memory.address is not None
    assert layer.memory.address.hashes.multipliers == ((1, 61 % 51, 0), (1, 61 % 53, 61 * 61 % 53))
    assert model.memory_plan.banks[0].num_rows == address.num_hashed_rows == 51 + 53


def test_rows_of_hashes_do_not_follow_the_vocabulary() -> None:
    for vocab_size in (61, None, 4096):
        model = replace(MODEL, vocab_size=vocab_size, memory=MoveConfig(num_slots=3, address=BIGRAMS, **VALUES))
        assert [bank.num_rows for bank in model.memory_plan.banks] == [3 * 59]


def test_a_vocabulary_beside_hashes_is_refused() -> None:
    memory = {"kind": "lave", **VALUES, "vocab_size": 61, "address": {"num_rows": 60}}
    with pytest.raises(
        ConfigError, match=r"model\.memory\.vocab_size has no effect unless model\.memory\.address is null"
    ):
        parse_config(
            {"model": {"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "memory": memory}}, RunConfig
        )


def test_tables_that_are_only_read_are_those_of_ids() -> None:
    config = RunConfig(model=replace(MODEL, memory=LaveConfig(address=BIGRAMS, **VALUES)))
    with pytest.raises(ConfigError, match="megamem tables is for rows of token ids"):
        token_tables(config, "megamem tables")
    config = RunConfig(model=replace(MODEL, memory=LaveConfig(**VALUES)))
    assert token_tables(config, "megamem tables") == config.model.memory
