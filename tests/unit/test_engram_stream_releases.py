"""Memories of several residual streams under the names of three public codes, held to recorded modules, and back.

Oracle of where their elements belong here: `EngramOfStreams` of `test_residual_streams.py`, by which a layer computes
what was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_residual_streams import EngramOfStreams, case_of
from torch import Tensor

from kernels.select import select_kernels
from megamem.config.model import ModelConfig
from pretrain.checkpoint.store.tensors import TensorReader, pieces
from pretrain.convert.released.modules import modules_as_ours, modules_as_released
from pretrain.errors import CheckpointError, ConfigError
from tests.in_memory import InMemory

WRITTEN = {
    "model_mhc_engram": "model.engram_layers.1.",
    "model_single_pass_engram": "model.layers.1.engram.",
    "model_gated_ple": "model.layers.1.ple.",
}
"""Beginnings of names that go out: of the demonstration, of V4.1 and of PLE."""
OURS = "decoder.layers.1.entry.memory."


class Module:
    """A recorded module of four streams, and a model that has it."""

    def __init__(self, golden_dir: Path, name: str) -> None:
        case = case_of(golden_dir, name, torch.float64, select_kernels("naive", device_type="cpu"))
        self.prefix = "layers.1.ple." if name == "model_gated_ple" else "layers.1.engram."
        start = f"param.{self.prefix}"
        self.parts = {key.removeprefix(start): tensor for key, tensor in case.tensors.items() if key.startswith(start)}
        sizes, multipliers = case.tensors["const.table_sizes"], case.tensors["const.multipliers"]
        starts = sizes.cumsum(0) - sizes
        if name == "model_mhc_engram":
            self.parts["multi_head_embedding.offsets"] = starts
        elif name == "model_gated_ple":
            self.parts |= {
                "ple_embedding.layer_multipliers": multipliers,
                "ple_embedding.ngram_heads_vocab_sizes": sizes,
                "ple_embedding.ngram_heads_offsets": starts,
            }
        recorded = EngramOfStreams(case)
        self.ours = {"banks.0.values": recorded.bank.get_parameter("values"), f"{OURS}multipliers": multipliers}
        for own, tensor in recorded.layer.named_parameters():
            if own != "lookup.values":
                self.ours[f"{OURS}{own}"] = tensor
        self.ours = {own: tensor.detach() for own, tensor in self.ours.items()}
        self.model = ModelConfig(
            num_layers=2,
            hidden_size=case.config["hidden"],
            num_attention_heads=2,
            vocab_size=case.config["vocab"],
            memory=recorded.memory,
            residual_streams=case.settings,
            tied_embeddings=False,
        )

    def stored(self, **changes: Tensor | None) -> InMemory:
        """The checkpoint, with changed or missing parts of the module."""
        parts = {**self.parts, **changes}
        found = {f"{self.prefix}{name}": tensor for name, tensor in parts.items() if tensor is not None}
        return InMemory({**found, "layers.1.attention.weight": torch.ones(3)})

    def of_streams(self, count: int | None) -> ModelConfig:
        """The model with another number of streams."""
        if count is None:
            return replace(self.model, residual_streams=None)
        assert self.model.residual_streams is not None
        return replace(self.model, residual_streams=replace(self.model.residual_streams, count=count))


def read_all(reader: TensorReader) -> dict[str, Tensor]:
    """Whole tensors, which are what pieces of them are that end within rows and parts."""
    found = {name: reader.read(info.whole(name)) for name, info in reader.tensors.items()}
    for name, info in reader.tensors.items():
        in_pieces = [reader.read(piece).flatten() for piece in pieces(info.whole(name), 11)]
        assert torch.equal(torch.cat(in_pieces), found[name].flatten()), name
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", WRITTEN)
def test_recorded_modules_come_in_and_go_out(golden_dir: Path, name: str) -> None:
    module = Module(golden_dir, name)
    ours = read_all(modules_as_ours(module.stored(), module.model))
    assert_equal(ours, module.ours)
    back = read_all(modules_as_released(InMemory(ours), module.model))
    assert_equal(back, {f"{WRITTEN[name]}{part}": tensor for part, tensor in module.parts.items()})
    assert_equal(read_all(modules_as_ours(InMemory(back), module.model)), ours)


@pytest.mark.parametrize("count", [None, 1, 3])
def test_modules_of_v4_1_have_any_number_of_streams(golden_dir: Path, count: int | None) -> None:
    """Without `model.residual_streams`, too: keys of the first streams, and the values, which are the last rows."""
    module, streams = Module(golden_dir, "model_single_pass_engram"), count or 1
    wide, wkv = streams * 12, module.parts["wkv.weight"]
    module.parts |= {name: module.parts[name][:streams] for name in ("k_weight", "q_weight")}
    module.parts["wkv.weight"] = torch.cat([wkv[:wide], wkv[48:]])
    expected = dict(module.ours)
    for own in ("key_proj", "key_gain", "query_gain"):
        expected[f"{OURS}{own}"] = expected[f"{OURS}{own}"][:wide]
    model = module.of_streams(count)
    ours = read_all(modules_as_ours(module.stored(), model))
    assert_equal(ours, expected)
    back = read_all(modules_as_released(InMemory(ours), model))
    assert_equal(back, {f"model.layers.1.engram.{part}": tensor for part, tensor in module.parts.items()})


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("model_mhc_engram", 5, r"key_projs\.4\.bias is missing from .* as model\.residual_streams\.count is, 5"),
        ("model_mhc_engram", 3, r"conv\.weight has shape \[48, 1, 4\], but \[36, 1, 4\] .*count is, 3"),
        (
            "model_mhc_engram",
            None,
            r"conv\.weight has shape .* one residual stream \(model\.residual_streams is null\)",
        ),
        ("model_single_pass_engram", 5, r"wkv\.weight has shape \[60, 24\], but \[72, 24\] .*count is, 5"),
        ("model_single_pass_engram", 3, r"wkv\.weight has shape \[60, 24\], but \[48, 24\] .*count is, 3"),
        ("model_single_pass_engram", None, r"wkv\.weight has shape \[60, 24\], but \[24, 24\] .*streams is null"),
        ("model_gated_ple", 5, r"key_proj\.weight has shape \[48, 16\], but \[60, 16\] .*count is, 5"),
        ("model_gated_ple", 3, r"key_proj\.weight has shape \[48, 16\], but \[36, 16\] .*count is, 3"),
        ("model_gated_ple", None, r"key_proj\.weight has shape \[48, 16\], but \[12, 16\] .*streams is null"),
    ],
)
def test_other_numbers_of_streams_are_refused(golden_dir: Path, name: str, count: int | None, words: str) -> None:
    module = Module(golden_dir, name)
    with pytest.raises(CheckpointError, match=words):
        modules_as_ours(module.stored(), module.of_streams(count))


def test_other_tensors_are_refused(golden_dir: Path) -> None:
    changes: tuple[tuple[str, dict[str, Tensor], str], ...] = (
        (
            "model_mhc_engram",
            {"key_projs.4.weight": torch.ones(12, 16)},
            r"key_projs\.4\.weight is in no .*count is, 4",
        ),
        ("model_mhc_engram", {"norm1.2.weight": torch.ones(16)}, r"norm1\.2\.weight has shape \[16\], but \[12\]"),
        ("model_single_pass_engram", {"k_weight": torch.ones(48)}, r"k_weight has shape \[48\], but \[4, 12\]"),
        ("model_gated_ple", {"norm_key.weight": torch.ones(12)}, r"norm_key\.weight has shape \[12\], but \[48\]"),
    )
    for name, change, words in changes:
        module = Module(golden_dir, name)
        with pytest.raises(CheckpointError, match=words):
            modules_as_ours(module.stored(**change), module.model)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_missing_tensor_is_named(golden_dir: Path, name: str) -> None:
    """Numbers that the configuration gives as well may be missing."""
    module = Module(golden_dir, name)
    for part in module.parts:
        if part.endswith(("offsets", "vocab_sizes")):
            modules_as_ours(module.stored(**{part: None}), module.model)
            continue
        with pytest.raises(CheckpointError, match=rf"{part} (is missing|has 0 rows)"):
            modules_as_ours(module.stored(**{part: None}), module.model)
    for own in module.ours:
        if own == f"{OURS}multipliers" and name != "model_gated_ple":
            continue
        rest = {each: tensor for each, tensor in module.ours.items() if each != own}
        with pytest.raises(CheckpointError, match=f"{own} is missing"):
            modules_as_released(InMemory(rest), module.model)


@pytest.mark.parametrize(
    ("rules", "biases", "taps", "fitting"),
    [
        ("engram", True, 0, "biases and a convolution, or neither"),
        ("engram", False, 4, "biases and a convolution, or neither"),
        ("ple", True, 4, "no biases"),
        ("ple", True, 0, "no biases"),
        ("ple", False, 0, "a convolution"),
    ],
)
def test_memories_that_no_code_has_are_refused(
    golden_dir: Path, rules: Any, biases: bool, taps: int, fitting: str
) -> None:
    module = Module(golden_dir, "model_gated_ple" if rules == "ple" else "model_mhc_engram")
    assert module.model.memory is not None
    changes: Any = {"projection_biases": biases, "conv_kernel": taps, "conv_epsilon": None}
    model = replace(module.model, memory=replace(module.model.memory, **changes))
    words = rf"projection_biases is {biases} and conv_kernel is {taps}, .* rules: {rules} have .*{fitting}"
    for convert in (modules_as_ours, modules_as_released):
        with pytest.raises(ConfigError, match=words):
            convert(module.stored(), model)
