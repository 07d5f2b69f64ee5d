"""Keys of n-gram memories that are token ids, beside the tokenizer of the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megamem.config.model import ModelConfig
from megamem.families.engram.config import EngramConfig
from pretrain.data.compression import write_token_map
from pretrain.data.ngram_ids import boundary_notes, check_token_maps
from pretrain.data.tokenizer import ByteTokenizer, Tokenizer
from pretrain.errors import ConfigError
from tests.unit.data.kinds_of_tokenizers import kinds


def mapped_by(path: Path) -> ModelConfig:
    memory = EngramConfig(token_map=str(path), compressed_vocab_size=int(np.load(path).max()) + 1)
    return ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, memory=memory)


@pytest.mark.parametrize("kind", kinds())
def test_a_map_of_the_same_tokenizer_is_taken(tmp_path: Path, kind: str) -> None:
    tokenizer = kinds()[kind]
    write_token_map(tokenizer, tmp_path / "map.npy")
    check_token_maps(mapped_by(tmp_path / "map.npy"), tokenizer)


def test_a_map_of_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    right = kinds()["byte_level"]
    path = tmp_path / "map.npy"
    mapped = write_token_map(right, path)
    # As of a vocabulary in another order.
    np.save(path, np.roll(mapped, 1))
    with pytest.raises(
        ConfigError, match=r"model\.memory\.token_map is .*map\.npy, of another tokenizer.*data compress"
    ):
        check_token_maps(mapped_by(path), right)


@pytest.mark.parametrize(
    ("tokenizer", "rules", "boundary", "is_told"),
    [
        (ByteTokenizer(), "ple", 0, True),
        (ByteTokenizer(), "ple", ByteTokenizer.eod, False),
        # These rules cut nowhere but at the sequence's start.
        (ByteTokenizer(), "engram", 0, False),
        (kinds()["byte_level"], "ple", 5, True),
    ],
)
def test_a_boundary_that_is_not_the_end_of_documents_is_told(
    tokenizer: Tokenizer, rules: str, boundary: int, is_told: bool
) -> None:
    memory = replace(EngramConfig(), rules=rules, boundary_id=boundary)
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, memory=memory)
    notes = list(boundary_notes(model, tokenizer))
    assert bool(notes) is is_told
    assert all(f"model.memory.boundary_id={tokenizer.eod}" in note for note in notes)
