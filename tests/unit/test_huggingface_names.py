"""Hugging Face's names: pairs that go both ways, configurations, tokenizers, and what cannot be imported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import export
from safetensors.torch import load_file, save_file
from torch import Tensor

from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.sharing import SharingConfig
from megamem.placement.slots import INSTEAD
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from pretrain.checkpoint.store.paired import PairedReader
from pretrain.checkpoint.store.selected import Padded
from pretrain.checkpoint.store.tensors import Region, TensorInfo, inverted
from pretrain.config.schema import RunConfig
from pretrain.convert.huggingface.card import Figures
from pretrain.convert.huggingface.config import exported_config, imported_config
from pretrain.convert.huggingface.folder import open_folder
from pretrain.convert.huggingface.names import pairs
from pretrain.convert.huggingface.tokenizer_files import read_tokenizer, write_tokenizer
from pretrain.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from pretrain.errors import CheckpointError, DataError
from tests.families.behind_heads.config import BehindHeadsConfig
from tests.in_memory import InMemory

VOCAB_SIZE, PADDED = 61, 64
BASE = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=6,
    ffn_hidden_size=20,
    vocab_size_multiple=16,
)
MEMORY = PkmConfig(num_keys=4, key_dim=4, top_k=2, value_dim=16)
MODELS = {
    "dense": BASE,
    "dense, untied, no qk_norm": replace(BASE, tied_embeddings=False, qk_norm=False, num_query_groups=None),
    "dense, biases": replace(BASE, qk_norm=False, qkv_bias=True),
    "moe": replace(BASE, moe=MoEConfig(num_experts=3, top_k=2, expert_ffn_hidden_size=12)),
    "memory": replace(BASE, memory=replace(MEMORY, sharing=SharingConfig("all"))),
    "memory instead": replace(BASE, memory=replace(MEMORY, placement=PlacementConfig(blocks=(1,), position="instead"))),
    "streams, mhc": replace(BASE, residual_streams=ResidualStreamsConfig(count=2)),
    "streams, gated, memory": replace(
        BASE, memory=MEMORY, residual_streams=ResidualStreamsConfig(kind="gated", count=2, rank=5)
    ),
}
# Weights of a site, and of the end, of two streams.
SITES: dict[str, dict[str, tuple[int, ...]]] = {
    "mhc": {"fn": (8, 32), "base": (8,), "scale": (3,)},
    "gated": {"norm": (32,), "down": (5, 32), "up": (32, 5), "inject": (2, 32)},
}
ENDS: dict[str, dict[str, tuple[int, ...]]] = {
    "mhc": {"fn": (2, 32), "base": (2,), "scale": (1,)},
    "gated": {"norm": (32,), "down": (5, 32), "up": (32, 5)},
}


def native(model: ModelConfig) -> dict[str, Tensor]:
    """Tensors of a model under the names and in the shapes that Megatron and the memories give them, by hand."""
    hidden, width, heads, groups = (
        model.hidden_size,
        model.attention_head_dim,
        model.num_attention_heads,
        model.query_groups,
    )
    streams = "" if model.residual_streams is None else model.residual_streams.kind
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (PADDED, hidden)}
    shapes |= {f"decoder.streams_end.{name}": shape for name, shape in ENDS.get(streams, {}).items()}
    if streams != "gated":
        shapes["decoder.final_layernorm.weight"] = (hidden,)
    if not model.tied_embeddings:
        shapes["output_layer.weight"] = (PADDED, hidden)
    at = {span.read: span for span in model.memory_spans}
    for layer in range(model.num_layers):
        block = f"decoder.layers.{layer}."
        for site in ("attention_streams", "ffn_streams"):
            shapes |= {f"{block}{site}.{name}": shape for name, shape in SITES.get(streams, {}).items()}
        if streams != "gated":
            shapes[f"{block}input_layernorm.weight"] = shapes[f"{block}pre_mlp_layernorm.weight"] = (hidden,)
        shapes[f"{block}self_attention.linear_qkv.weight"] = ((heads + 2 * groups) * width, hidden)
        shapes[f"{block}self_attention.linear_proj.weight"] = (hidden, heads * width)
        if model.qkv_bias:
            shapes[f"{block}self_attention.linear_qkv.bias"] = ((heads + 2 * groups) * width,)
        if model.qk_norm:
            for side in "qk":
                shapes[f"{block}self_attention.{side}_layernorm.weight"] = (width,)
        mlp = f"{block}mlp."
        if layer in at and model.memory is not None:
            shapes[f"{mlp}memory.query_proj"] = (8, hidden)
            shapes[f"{mlp}memory.keys"] = (1, 2, 4, 4)
            if model.memory.slot_of(at[layer]) == INSTEAD:
                continue
            mlp += "ffn."
        if model.moe is None:
            shapes |= {f"{mlp}linear_fc1.weight": (40, hidden), f"{mlp}linear_fc2.weight": (hidden, 20)}
        else:
            shapes[f"{mlp}router.weight"] = (3, hidden)
            for expert in range(3):
                shapes[f"{mlp}experts.{expert}.linear_fc1.weight"] = (24, hidden)
                shapes[f"{mlp}experts.{expert}.linear_fc2.weight"] = (hidden, 12)
    for bank in model.memory_plan.banks:
        shapes[f"banks.{bank.index}.values"] = (bank.num_rows, 16)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in tensors:
            tensors[name][VOCAB_SIZE:] = 0
    return tensors


def all_of(reader: Any) -> dict[str, Tensor]:
    return {name: reader.read(info.whole(name)) for name, info in reader.tensors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_pairs_go_both_ways_bit_for_bit(name: str) -> None:
    model, ours = MODELS[name], InMemory(native(MODELS[name]))
    found = pairs(model, vocab_size=VOCAB_SIZE, tensors=ours.tensors)
    there = PairedReader(inverted(found), ours)
    # Every element is somewhere, once.
    assert sum(pair.ours.numel for pair in found) == sum(pair.theirs.numel for pair in found)
    padding = (PADDED - VOCAB_SIZE) * model.hidden_size * (1 if model.tied_embeddings else 2)
    assert sum(pair.ours.numel for pair in found) == sum(t.numel() for t in ours.held.values()) - padding
    theirs = InMemory(all_of(there))
    padded = dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), (PADDED, model.hidden_size))
    back = Padded(PairedReader(found, theirs), padded)
    assert back.tensors == ours.tensors
    assert all(torch.equal(tensor, ours.held[each]) for each, tensor in all_of(back).items())


def test_any_region_is_that_of_the_whole() -> None:
    model, ours = MODELS["dense"], InMemory(native(MODELS["dense"]))
    found = inverted(pairs(model, vocab_size=VOCAB_SIZE, tensors=ours.tensors))
    reader = PairedReader(found, ours)
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = reader.read(reader.tensors[name].whole(name))
    for offset, shape in (((0, 3), (24, 5)), ((5, 0), (9, 16)), ((11, 2), (1, 1)), ((12, 0), (12, 16))):
        part = tuple(slice(a, a + b) for a, b in zip(offset, shape, strict=True))
        assert torch.equal(reader.read(Region(name, offset, shape)), whole[part])


def test_rows_are_where_megatron_has_them() -> None:
    """Per key/value head: its queries, its key, its value; and gate before up."""
    held = native(BASE)
    qkv = held["decoder.layers.0.self_attention.linear_qkv.weight"]
    fc1 = held["decoder.layers.0.mlp.linear_fc1.weight"]
    ours = InMemory(held)
    found = inverted(pairs(BASE, vocab_size=VOCAB_SIZE, tensors=ours.tensors))
    theirs = all_of(PairedReader(found, ours))
    heads = qkv.view(2, 4, 6, 16)
    prefix = "model.layers.0."
    assert torch.equal(theirs[f"{prefix}self_attn.q_proj.weight"], heads[:, :2].reshape(24, 16))
    assert torch.equal(theirs[f"{prefix}self_attn.k_proj.weight"], heads[:, 2].reshape(12, 16))
    assert torch.equal(theirs[f"{prefix}self_attn.v_proj.weight"], heads[:, 3].reshape(12, 16))
    assert torch.equal(theirs[f"{prefix}mlp.gate_proj.weight"], fc1[:20])
    assert torch.equal(theirs[f"{prefix}mlp.up_proj.weight"], fc1[20:])
    assert theirs["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 16)


def test_a_checkpoint_without_a_weight_is_refused() -> None:
    held = native(BASE)
    del held["decoder.layers.1.mlp.linear_fc2.weight"]
    ours = InMemory(held)
    found = inverted(pairs(BASE, vocab_size=VOCAB_SIZE, tensors=ours.tensors))
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.1\.mlp\.linear_fc2\.weight is missing"):
        PairedReader(found, ours)


def export_config(model: ModelConfig, **changes: Any) -> dict[str, Any]:
    tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in native(model).items()}
    content = exported_config(
        model, vocab_size=VOCAB_SIZE, sequence_length=32, eod=60, dtype=torch.float32, seed=1, tensors=tensors
    )
    return json.loads(json.dumps({**content, **changes}))


@pytest.mark.parametrize("name", ["dense", "dense, untied, no qk_norm", "dense, biases"])
def test_configurations_of_dense_models_go_both_ways(name: str) -> None:
    model = replace(MODELS[name], vocab_size_multiple=128, rotary_base=5000, norm_epsilon=1e-6)
    assert imported_config(export_config(model), "config.json").model == replace(model, vocab_size=VOCAB_SIZE)


def test_older_files_say_it_otherwise() -> None:
    content = export_config(MODELS["dense, untied, no qk_norm"], rope_theta=7000.0, rope_scaling=None)
    del content["rope_parameters"], content["head_dim"], content["num_key_value_heads"]
    model = imported_config(content, "config.json").model
    assert (model.rotary_base, model.attention_head_dim, model.query_groups) == (7000, 4, 4)


REFUSED: dict[str, Any] = {
    "rope_scaling": {"type": "longrope", "factor": 2.0},
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4},
    "rope_theta": 0.5,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "use_sliding_window": True,
    "sliding_window": 128,
    "layer_types": ["full_attention", "sliding_attention"],
    "attention_dropout": 0.1,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"bits": 4},
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 0,
    "hidden_size": "16",
    "head_dim": -6,
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_represented_is_refused_by_name(key: str) -> None:
    content = export_config(MODELS["dense, untied, no qk_norm"])
    if key == "rope_theta":
        del content["rope_parameters"]
    content[key] = REFUSED[key]
    with pytest.raises(CheckpointError, match=rf"some/config\.json: {key} is "):
        imported_config(content, "some/config.json")


def test_the_window_that_a_mistral_has_unless_it_says_otherwise_is_refused() -> None:
    content = {**export_config(MODELS["dense, untied, no qk_norm"]), "architectures": ["MistralForCausalLM"]}
    with pytest.raises(CheckpointError, match="sliding_window is 4096: imported models attend to whole sequences"):
        imported_config(content, "config.json")
    assert not imported_config({**content, "sliding_window": None}, "config.json").model.qk_norm


def test_norms_behind_sublayers_are_refused_in_words() -> None:
    content = {**export_config(BASE), "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(
        CheckpointError, match=r"architectures is \['Olmo2ForCausalLM'\]: its norms stand behind attention"
    ):
        imported_config(content, "config.json")


def test_a_sliding_window_that_is_switched_off_is_none() -> None:
    content = export_config(BASE, sliding_window=4096, use_sliding_window=False)
    assert imported_config(content, "config.json").model.qk_norm


def test_a_memory_that_the_exported_model_does_not_know_is_refused() -> None:
    model = replace(BASE, memory=MEMORY)
    tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in native(model).items()}
    tensors["decoder.layers.0.mlp.memory.novelty"] = TensorInfo((1,), torch.float32)
    with pytest.raises(CheckpointError, match=r"model\.memory\.kind is pkm, .*novelty"):
        exported_config(
            model, vocab_size=VOCAB_SIZE, sequence_length=32, eod=60, dtype=torch.float32, seed=1, tensors=tensors
        )


def test_a_memory_of_another_kind_of_rows_is_refused() -> None:
    memory = BehindHeadsConfig(value_dim=8, placement=PlacementConfig(blocks=(1,)))
    with pytest.raises(
        CheckpointError, match=r"model\.memory\.kind is behind_heads, which chooses .* neither by scores nor by tokens"
    ):
        exported_config(
            replace(BASE, memory=memory, head_dim=None),
            vocab_size=VOCAB_SIZE,
            sequence_length=32,
            eod=60,
            dtype=torch.float32,
            seed=1,
            tensors={},
        )


def test_the_seed_keys_the_shuffles() -> None:
    memory = UltraMemV2Config(num_keys=4, key_dim=4, value_dim=16, top_k=2)
    names = ("query_proj", "query_norm", "keys", "keys_norm", "cores", "u", "v", "value_proj")
    infos = {
        f"decoder.layers.{layer}.mlp.memory.{name}": TensorInfo((1,), torch.float32)
        for layer in (0, 1)
        for name in names
    }
    found = []
    for seed in (1, 2):
        content = exported_config(
            replace(BASE, memory=memory, head_dim=None),
            vocab_size=61,
            sequence_length=32,
            eod=60,
            dtype=torch.float32,
            seed=seed,
            tensors=infos,
        )
        found += [tuple(layer["round_keys"]) for layer in content["memory"]["layers"]]
    assert len(set(found)) == len(found) == 4


# --- tokenizers ---

TEXT = "def f(x):\n\treturn 'é' + \"\U0001f600\"  # two  spaces\r\n\x00\x7f\xa0\xad" + "".join(map(chr, range(700)))


@pytest.fixture
def bpe(tmp_path: Path) -> Any:
    return train_bpe([TEXT] * 3, 300, tmp_path / "trained.json")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_written_tokenizer_makes_the_same_ids(tmp_path: Path, bpe: Any, kind: str) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tokenizer(tokenizer, folder, sequence_length=32)
    read = read_tokenizer(folder)
    assert read.tokenize(TEXT) == tokenizer.tokenize(TEXT)
    assert read.detokenize(read.tokenize(TEXT)) == TEXT
    assert (read.eod, read.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)
    assert kind == "bpe" or read.fingerprint == tokenizer.fingerprint


def test_what_training_did_not_apply_is_left_out(tmp_path: Path, bpe: Any) -> None:
    definition = json.loads(bpe.definition)
    template = {"Sequence": {"id": "A", "type_id": 0}}
    start = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [bpe.eod], "tokens": ["<|endoftext|>"]}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, template],
        "pair": [start, template],
        "special_tokens": tokens,
    }
    definition["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tokenizer(load_tokenizer(tmp_path), folder, sequence_length=32)
    from tokenizers import Tokenizer as Backend

    assert Backend.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids == bpe.tokenize(TEXT)


@pytest.mark.parametrize(
    ("settings", "config", "token"),
    [
        ({"eos_token": "b"}, {"eos_token_id": 3}, "b"),
        ({"eos_token": {"content": "b"}}, {}, "b"),
        ({}, {"eos_token_id": [257, 3]}, "<|endoftext|>"),
        (None, {"eos_token_id": None}, "<|endoftext|>"),
    ],
)
def test_documents_end_with_the_end_of_sequence_token(
    tmp_path: Path, bpe: Any, settings: Any, config: Any, token: str
) -> None:
    bpe.save(tmp_path)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if config.get("eos_token_id"):
        config = {"eos_token_id": [bpe.eod, 3]} if isinstance(config["eos_token_id"], list) else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_tokenizer(tmp_path).eod_token == token


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="save_pretrained"):
        read_tokenizer(tmp_path)


# --- whole folders ---


@pytest.fixture
def folder(tmp_path: Path, bpe: Any) -> Path:
    """A small Llama's, without a line of transformers."""
    model = MODELS["dense, untied, no qk_norm"]
    ours = InMemory(native(model))
    found = inverted(pairs(model, vocab_size=VOCAB_SIZE, tensors=ours.tensors))
    path = tmp_path / "llama"
    path.mkdir()
    save_file(all_of(PairedReader(found, ours)), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(export_config(model)))
    bpe.save(path)
    return path


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a folder by name, with dots as two underscores; None removes one."""
    held = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, folder / "model.safetensors")


def test_a_folder_opens_as_a_model_of_ours(folder: Path) -> None:
    imported = open_folder(folder)
    model = MODELS["dense, untied, no qk_norm"]
    assert imported.model == replace(model, vocab_size=VOCAB_SIZE, vocab_size_multiple=128)
    expected = native(model)
    for name, tensor in all_of(imported.tensors).items():
        assert torch.equal(tensor[: expected[name].shape[0]], expected[name])
        assert not tensor[expected[name].shape[0] :].any()
    assert imported.tensors.tensors["embedding.word_embeddings.weight"].shape == (128, 16)
    assert imported.tensors.tensors.keys() == expected.keys()


def test_weights_that_the_configuration_does_not_explain_are_refused(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(24))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias, which imported models do not have"):
        open_folder(folder)


def test_a_weight_of_another_shape_is_refused(folder: Path) -> None:
    for rows in (VOCAB_SIZE + 1, VOCAB_SIZE - 1):
        change(folder, model__embed_tokens__weight=torch.zeros(rows, 16))
        with pytest.raises(CheckpointError, match=rf"model\.embed_tokens\.weight has the shape \({rows}, 16\)"):
            open_folder(folder)


def test_a_weight_that_is_missing_is_named(folder: Path) -> None:
    change(folder, model__norm__weight=None)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        open_folder(folder)


def test_frequencies_of_old_files_are_passed_over(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(3))
    open_folder(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**12), ("num_key_value_heads", 10**12), ("num_attention_heads", 10**12)]
)
def test_a_configuration_of_a_huge_model_is_refused_at_once(folder: Path, key: str, value: int) -> None:
    content = json.loads((folder / "config.json").read_text())
    content |= {key: value}
    if key == "num_key_value_heads":
        content["num_attention_heads"] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        open_folder(folder)


def test_a_folder_without_a_configuration_is_refused(folder: Path) -> None:
    shutil.copy(folder / "tokenizer.json", folder / "config.json")
    with pytest.raises(CheckpointError, match="architectures is None"):
        open_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_folder(folder)


def test_a_configuration_that_is_too_large_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as stream:
        stream.truncate(2**40)
    with pytest.raises(CheckpointError, match="1099511627776 bytes"):
        open_folder(folder)


@pytest.mark.parametrize("name", ["moe", "memory", "memory instead"])
def test_an_exported_model_of_ours_opens_as_what_it_was(tmp_path: Path, name: str) -> None:
    config = RunConfig(seed=7, model=MODELS[name])
    ours = InMemory(native(MODELS[name]))
    export(config, ours, tmp_path, tokenizer=ByteTokenizer(), vocab_size=VOCAB_SIZE, figures=Figures(1, 2))
    opened = open_folder(tmp_path)
    assert (opened.config.seed, opened.model) == (7, replace(MODELS[name], vocab_size=VOCAB_SIZE))
    assert opened.tensors.tensors == ours.tensors
    assert all(torch.equal(tensor, ours.held[each]) for each, tensor in all_of(opened.tensors).items())


@pytest.mark.parametrize("change", [None, {}, {"seed": 1, "model": {"num_layers": -1}}, {"seed": 1, "model": {}}])
def test_an_exported_model_that_does_not_say_what_it_was_is_refused(change: Any) -> None:
    with pytest.raises(CheckpointError, match="native"):
        imported_config({**export_config(MODELS["memory"]), "native": change}, "config.json")


def test_an_exported_model_larger_than_its_weights_is_refused(tmp_path: Path) -> None:
    config = RunConfig(model=MODELS["moe"])
    ours = InMemory(native(MODELS["moe"]))
    export(config, ours, tmp_path, tokenizer=ByteTokenizer(), vocab_size=VOCAB_SIZE, figures=Figures(1, 2))
    content = json.loads((tmp_path / "config.json").read_text())
    content["native"]["model"]["moe"]["num_experts"] = 10**12
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="and the weights have fewer"):
        open_folder(tmp_path)
