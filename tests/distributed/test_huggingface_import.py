"""Models that transformers made compute the same once they are imported, and can be trained on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import export
from tiny_runs import SHARED, chunk_of, joined
from torch import Tensor

from pretrain.checkpoint.store.safetensors_store import open_safetensors
from pretrain.convert.huggingface.card import Figures
from pretrain.convert.huggingface.folder import open_folder
from pretrain.data.tokenizer import train_bpe
from pretrain.errors import CheckpointError
from tests.whole_tensors import whole_tensors

transformers = pytest.importorskip("transformers", reason="models to import are made with it: pip install '.[hf]'")

VOCAB_SIZE = 300
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama 3.1": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "qwen3, yarn": (
        "Qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama, tied, wide heads": ("Llama", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True, "sliding_window": 8}),
    "qwen3, untied, one head": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 8, "max_window_layers": 1}),
}


def tokens() -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def imported(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor, Path, Path]]:
    """Logits in transformers, those of our model, the folder, and the folder that ours was exported to, by name."""
    root = tmp_path_factory.mktemp("import")
    expected, folders = {}, {}
    for number, (name, (kind, options)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        config = getattr(transformers, f"{kind}Config")(**SMALL | options)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            # Norms start at 1, which would hide where they stand.
            for weight in model.parameters():
                weight += 0.1 * torch.randn_like(weight)
            expected[name] = model(tokens()).logits
        folders[name] = root / str(number)
        model.save_pretrained(folders[name], max_shard_size="20KB")
        train_bpe(["some text for a tokenizer"] * 3, VOCAB_SIZE, folders[name] / "tokenizer.json")

    def main() -> dict[str, Tensor]:
        found = {}
        positions = torch.arange(16).expand(2, -1)
        with joined(SHARED) as groups:
            for name, folder in folders.items():
                opened = open_folder(folder)
                config = replace(SHARED, model=opened.model)
                chunk = chunk_of(config, groups, opened.tensors, VOCAB_SIZE)
                with torch.no_grad():
                    found[name] = chunk.eval()(tokens(), positions, None)[..., :VOCAB_SIZE]
                target = folder.with_suffix(".again")
                target.mkdir()
                arguments: Any = {"tokenizer": opened.tokenizer, "vocab_size": VOCAB_SIZE, "figures": Figures(0, 0)}
                export(config, whole_tensors(chunk), target, **arguments)
        return found

    (ours,) = run_ranks(main, 1)
    return {name: (expected[name], ours[name], folders[name], folders[name].with_suffix(".again")) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(imported: Any, name: str) -> None:
    expected, ours, *_ = imported[name]
    scale = float(expected.abs().max())
    assert scale > 0.5
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * scale)


def test_weights_in_pickles_are_those_of_safetensors(imported: Any, tmp_path: Path) -> None:
    """One file, and several beside an index; nothing in them is run, nor read elsewhere."""
    folder = imported["llama"][2]
    expected = open_folder(folder).tensors
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    halves = {name: f"part{number % 2}.bin" for number, name in enumerate(weights)}
    for number, files in enumerate(({"pytorch_model.bin": set(weights)}, {"part0.bin": set(), "part1.bin": set()})):
        path = tmp_path / str(number)
        path.mkdir()
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(folder / name, path)
        for file in files:
            torch.save(
                {key: value for key, value in weights.items() if number == 0 or halves[key] == file}, path / file
            )
        index = path / "pytorch_model.bin.index.json"
        if number:
            index.write_text(json.dumps({"weight_map": halves}))
        found = open_folder(path).tensors
        assert found.tensors == expected.tensors
        for name, info in expected.tensors.items():
            assert torch.equal(found.read(info.whole(name)), expected.read(info.whole(name)))
    index.write_text(json.dumps({"weight_map": {"a": "../0/pytorch_model.bin"}}))
    with pytest.raises(CheckpointError, match="names no files beside it"):
        open_folder(path)


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_is_exported_as_it_came(imported: Any, name: str) -> None:
    """Every weight bit for bit, and the class that transformers loads."""
    expected, _, first, second = imported[name]
    before, after = open_safetensors(first), open_safetensors(second)
    assert after.tensors == before.tensors
    for each, info in before.tensors.items():
        assert torch.equal(after.read(info.whole(each)), before.read(info.whole(each)))
    model = transformers.AutoModelForCausalLM.from_pretrained(second).eval()
    # Mistral's blocks are Llama's.
    kind = MODELS[name][0].replace("Mistral", "Llama")
    assert type(model).__name__ == f"{kind}ForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=0, atol=1e-6)
