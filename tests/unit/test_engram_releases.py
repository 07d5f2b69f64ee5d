"""Memories of n-grams under the names of DeepSeek's demonstration and of Qwen's PLE, held to tensors that these codes recorded,
and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engram_golden import RECORDED, memory_of
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.placement.spans import PlacementConfig
from pretrain.checkpoint.store.tensors import TensorReader
from pretrain.convert.released.modules import modules_as_ours, modules_as_released
from pretrain.errors import CheckpointError, ConfigError
from tests.golden import read_case
from tests.in_memory import InMemory

PREFIXES = {
    ("ds_basic", "layers.1.engram."): "model.engram_layers.1.",
    ("ds_basic", "model.engram_layers.1."): "model.engram_layers.1.",
    ("qwen_basic", "model.language_model.layers.1.ple."): "model.layers.1.ple.",
}
"""Names that go out, by case and by names that come in."""
OURS = "decoder.layers.1.entry.memory."


class Module:
    """A recorded module in a checkpoint with other tensors, and the model that it belongs to."""

    def __init__(self, folder: Path, name: str, tmp_path: Path, prefix: str | None = None) -> None:
        self.config, self.tensors = read_case(folder / "engram", name)
        self.is_qwen = name.startswith("qwen")
        self.prefix = prefix or next(there for case, there in PREFIXES if case == name)
        memory = replace(memory_of(self.config), placement=PlacementConfig(blocks=(1,)))
        if not self.is_qwen:
            np.save(tmp_path / "map.npy", self.tensors["in.token_map"].numpy())
            memory = replace(memory, token_map=str(tmp_path / "map.npy"))
        self.model = ModelConfig(
            num_layers=2, hidden_size=32, vocab_size=memory.vocab_size, memory=memory, tied_embeddings=False
        )
        parts = {key.removeprefix("param."): t for key, t in self.tensors.items() if key.startswith("param.")}
        self.parts = {name: tensor.float() for name, tensor in parts.items()}
        sizes = self.tensors["const.table_sizes"]
        starts = sizes.cumsum(0) - sizes
        if self.is_qwen:
            self.parts |= {
                "ple_embedding.layer_multipliers": self.tensors["const.multipliers"],
                "ple_embedding.ngram_heads_vocab_sizes": sizes,
                "ple_embedding.ngram_heads_offsets": starts,
            }
        else:
            self.parts["multi_head_embedding.offsets"] = starts

    def stored(self, **changes: Tensor | None) -> dict[str, Tensor]:
        """The checkpoint, with changed or missing parts of the module."""
        parts = {**self.parts, **changes}
        found = {f"{self.prefix}{name}": tensor for name, tensor in parts.items() if tensor is not None}
        return {**found, "layers.1.attention.weight": torch.ones(3), "layers.11.engram.other": torch.ones(2)}

    @property
    def memory(self) -> EngramConfig:
        assert isinstance(self.model.memory, EngramConfig)
        return self.model.memory

    def with_memory(self, **changes: Any) -> ModelConfig:
        return replace(self.model, memory=replace(self.memory, **changes))


@pytest.fixture(params=PREFIXES, ids=str)
def module(request: Any, golden_dir: Path, tmp_path: Path) -> Module:
    name, prefix = request.param
    return Module(golden_dir, name, tmp_path, prefix)


def read_all(reader: TensorReader) -> dict[str, Tensor]:
    return {name: reader.read(info.whole(name)) for name, info in reader.tensors.items()}


def test_recorded_modules_come_in_and_go_out(module: Module) -> None:
    """Names and gains are those of `test_engram_golden.py`, by which a layer adds what was recorded."""
    ours = read_all(modules_as_ours(InMemory(module.stored()), module.model))
    expected = {f"{OURS}multipliers": module.tensors["const.multipliers"]}
    if not module.is_qwen:
        expected[f"{OURS}token_map"] = module.tensors["in.token_map"]
    for name, theirs in RECORDED["qwen" if module.is_qwen else "deepseek"].items():
        recorded = module.parts[theirs] + (1.0 if module.is_qwen and name.endswith("gain") else 0.0)
        expected["banks.0.values" if name == "table" else f"{OURS}{name}"] = recorded.squeeze()
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []

    back = read_all(modules_as_released(InMemory(ours), module.model))
    prefix = next(out for (_, into), out in PREFIXES.items() if into == module.prefix)
    assert back.keys() == {f"{prefix}{name}" for name in module.parts}
    for name, tensor in module.parts.items():
        found = back[f"{prefix}{name}"]
        assert found.shape == tensor.shape
        # 1 + w is rounded.
        within = 2**-23 if module.is_qwen and name.startswith("norm_") else 0.0
        assert (found - tensor).abs().max() <= within, name
    again = read_all(modules_as_ours(InMemory(back), module.model))
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())


def test_gains_in_bf16_come_in_with_all_bits(golden_dir: Path, tmp_path: Path) -> None:
    module = Module(golden_dir, "qwen_basic", tmp_path)
    gain = torch.full((32,), 2.0**-12, dtype=torch.bfloat16)
    ours = modules_as_ours(InMemory(module.stored(**{"norm_key.weight": gain})), module.model)
    (name,) = (name for name in ours.tensors if name.endswith("key_gain"))
    read = ours.read(ours.tensors[name].whole(name))
    assert (read.dtype, float(read[0])) == (torch.float32, 1 + 2.0**-12)


def test_a_table_in_parts_is_one(golden_dir: Path, tmp_path: Path) -> None:
    """As a public checkpoint has it, the tenth part behind the ninth."""
    module = Module(golden_dir, "qwen_basic", tmp_path)
    table = module.parts["ple_embedding.ngram_embedding.weight"]
    parts: dict[str, Tensor | None] = {"ple_embedding.ngram_embedding.weight": None}
    parts |= {
        f"ple_embedding.ngram_embedding.shard_{number}.weight": part for number, part in enumerate(table.chunk(12))
    }
    ours = modules_as_ours(InMemory(module.stored(**parts)), module.model)
    assert torch.equal(ours.read(ours.tensors["banks.0.values"].whole("banks.0.values")), table)


def test_rows_that_pad_a_table_stay_here(golden_dir: Path, tmp_path: Path) -> None:
    module = Module(golden_dir, "ds_basic", tmp_path)
    padded = module.with_memory(rows_multiple=128)
    with pytest.raises(
        CheckpointError,
        match=r"152 rows, in one part or several, and the memory of block 1 256: set .*rows_multiple to 1",
    ):
        modules_as_ours(InMemory(module.stored()), padded)
    ours = read_all(modules_as_ours(InMemory(module.stored()), module.model))
    ours["banks.0.values"] = torch.cat([ours["banks.0.values"], torch.ones(104, 8)])
    back = modules_as_released(InMemory(ours), padded)
    assert back.tensors["model.engram_layers.1.multi_head_embedding.embedding.weight"].shape == (152, 8)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        (
            "ds_basic",
            {"key_projs.1.weight": torch.ones(32, 32)},
            r"key_projs\.1\.weight is in no module that reads one",
        ),
        ("ds_basic", {"norm2.0.weight": None}, r"layers\.1\.engram\.norm2\.0\.weight is missing"),
        (
            "qwen_basic",
            {"key_proj.weight": torch.ones(128, 32)},
            r"key_proj\.weight has shape \[128, 32\], .* \[32, 32\]",
        ),
        (
            "qwen_basic",
            {"ple_embedding.ngram_heads_vocab_sizes": torch.arange(8)},
            r"vocab_sizes is not \[.*, as the keys of model\.memory",
        ),
        (
            "ds_basic",
            {"multi_head_embedding.offsets": torch.arange(4)},
            r"offsets is not \[.*, as the keys of model\.memory",
        ),
        ("qwen_basic", {"ple_embedding.ngram_embedding.weight": None}, "has 0 rows"),
    ],
    ids=["streams", "missing", "fused streams", "heads", "starts", "no table"],
)
def test_other_modules_are_refused(
    golden_dir: Path, tmp_path: Path, case: str, changes: dict[str, Tensor | None], words: str
) -> None:
    module = Module(golden_dir, case, tmp_path)
    with pytest.raises(CheckpointError, match=words):
        modules_as_ours(InMemory(module.stored(**changes)), module.model)


def test_memories_that_the_codes_do_not_have_are_refused(golden_dir: Path, tmp_path: Path) -> None:
    module = Module(golden_dir, "ds_basic", tmp_path)
    source = InMemory(module.stored())
    for changes, words in (
        (
            {"projection_biases": False},
            "projection_biases is False and conv_kernel is 4, .* rules: engram have biases and",
        ),
        ({"conv_kernel": 0, "conv_epsilon": None}, "projection_biases is True and conv_kernel is 0, "),
    ):
        with pytest.raises(ConfigError, match=words):
            modules_as_ours(source, module.with_memory(**changes))
        with pytest.raises(ConfigError, match=words):
            modules_as_released(source, module.with_memory(**changes))
    with pytest.raises(
        CheckpointError, match=r"has 0 modules engram_layers\.0 or layers\.0\.engram.*placement\.blocks"
    ):
        modules_as_ours(source, module.with_memory(placement=PlacementConfig(blocks=(0,))))
    left = replace(module.with_memory(vocab_size=None), vocab_size=None)
    with pytest.raises(ConfigError, match="vocab_size is left to the tokenizer"):
        modules_as_ours(source, left)
    missing = module.with_memory(token_map=str(tmp_path / "none.npy"))
    with pytest.raises(ConfigError, match=r"none\.npy"):
        modules_as_ours(source, missing)
