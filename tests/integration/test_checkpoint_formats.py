"""Checkpoints go to other formats and come back, and are trained on there and here: by the commands that a person types."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
import yaml
from commands import TINY, Megamem, checkpoint, steps, tensors
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pretrain.convert.registry import open_checkpoint
from pretrain.convert.resources import Resources
from pretrain.convert.verify import problems_of
from pretrain.errors import UserError
from tests.rotation import in_rotation
from tools.cli import main


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, corpus: Path) -> Path:
    """A dense model after three steps."""
    folder = tmp_path_factory.mktemp("dense")
    config = {
        **TINY,
        # As many as the embedding has rows: padding would not come back.
        "model": {**TINY["model"], "memory": None, "vocab_size": 384},
        "train": {**TINY["train"], "num_steps": 3},
        "optimizer": {"lr": 4e-3, "min_lr": 4e-4},
        "data": {"datasets": [{"path": str(corpus)}]},
    }
    (folder / "dense.yaml").write_text(yaml.safe_dump(config))
    result = megamem("train", folder / "dense.yaml", "--run-dir", folder / "run")
    assert result.code == 0, result.output
    return folder / "run"


def convert(megamem: Megamem, *args: object) -> str:
    result = megamem("checkpoint", "convert", *args)
    assert result.code == 0, result.output
    assert "equal, as read back" in result.output
    return result.output


def test_every_flip_in_an_exported_folder_is_found(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    convert(megamem, saved_run, exported, "--format", "huggingface", "--max-file-size", "64KiB")
    sums = exported / "SHA256SUMS"
    subprocess.run(["sha256sum", "--check", "--strict", sums.name], cwd=exported, check=True, capture_output=True)
    names = sorted(path.name for path in exported.iterdir())
    assert [line.split("  ")[1] for line in sums.read_text().splitlines()] == [
        name for name in names if name != sums.name
    ]
    assert len(names) > 10
    for name in names:
        path = exported / name
        whole = path.read_bytes()
        # In a tensor file, of a tensor; in the others, whatever is there.
        path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        try:
            resources = Resources(1, 2 << 30)
            found = problems_of(open_checkpoint(exported), resources, finite=False, on_start=lambda *_: lambda _: None)
        except UserError as error:
            found = [str(error)]
        assert found
        assert name == sums.name or name in found[0]
        path.write_bytes(whole)
    (exported / "README.md").unlink()
    result = megamem("checkpoint", "verify", exported)
    assert (result.code, "README.md cannot be read" in result.output) == (4, True)


def test_a_memory_model_goes_to_hugging_face_and_back(
    megamem: Megamem, saved_run: Path, corpus: Path, tmp_path: Path
) -> None:
    exported, back = tmp_path / "exported", tmp_path / "back"
    convert(megamem, saved_run, exported, "--format", "huggingface", "--max-file-size", "64KiB")
    assert {"config.json", "README.md", "tokenizer.json", "modeling_megamem.py"} <= {
        each.name for each in exported.iterdir()
    }
    assert (exported / "model.safetensors.index.json").is_file()
    assert "is whole" in megamem("checkpoint", "verify", exported).output
    output = convert(megamem, exported, back)
    assert "without optimizer state" not in output
    # The padding of the vocabulary is not exported: its rows are zeros here.
    difference = megamem("checkpoint", "diff", saved_run, back, "--weights-only")
    assert [line.split()[0] for line in difference.output.splitlines() if " differs in " in line] == [
        "embedding.word_embeddings.weight"
    ]
    original, imported = tensors(checkpoint(saved_run, 6)), tensors(checkpoint(back, 0))
    rows = "embedding.word_embeddings.weight"
    assert torch.equal(imported[rows][:257], original[f"optimizer.state.param.{rows}"][:257])
    assert not imported[rows][257:].any()
    assert megamem("checkpoint", "verify", back, "--finite").code == 0
    settings = (
        "train.num_steps=1",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "train.sequence_length=32",
    )
    result = megamem("train", back / "config.yaml", "--run-dir", back, f"data.datasets=[{{path: {corpus}}}]", *settings)
    assert result.code == 0, result.output
    assert steps(back)[0]["loss"] < steps(saved_run)[0]["loss"] - 0.5


def test_a_run_begins_from_weights_alone_with_fresh_moments(
    megamem: Megamem, saved_run: Path, config_file: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half"
    output = convert(megamem, saved_run, half, "--step", 3, "--weights-only")
    assert "begins with fresh moments" in output
    result = megamem(
        "train",
        config_file,
        "--run-dir",
        half,
        "train.num_steps=4",
        "checkpoint.every_steps=1",
        "optimizer.lr=1e-9",
        "optimizer.min_lr=0",
    )
    assert result.code == 0, result.output
    # The loss of the fourth step is that of the weights before it.
    assert steps(half)[0]["loss"] == steps(saved_run)[3]["loss"]
    after, before = tensors(checkpoint(half, 4)), tensors(checkpoint(saved_run, 3))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    fresh, kept = (state[f"optimizer.state.exp_avg_sq.{name}"] for state in (after, before))
    assert fresh.any()
    # A step leaves 0.95 of kept ones, whatever it adds.
    assert (fresh < 0.9 * kept).any()
    torch.testing.assert_close(after[f"optimizer.state.param.{name}"], before[f"optimizer.state.param.{name}"])


def test_a_dense_run_goes_to_a_qwen3_and_back(megamem: Megamem, dense_run: Path, tmp_path: Path) -> None:
    exported, back = tmp_path / "exported", tmp_path / "back"
    convert(megamem, dense_run, exported, "--format", "huggingface")
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert not list(exported.glob("*.py"))
    convert(megamem, exported, back)
    for made in (exported, back):
        same = megamem("checkpoint", "diff", dense_run, made, "--weights-only")
        assert same.code == 0, same.output


def test_a_memory_model_goes_to_its_release_and_back(
    megamem: Megamem, saved_run: Path, config_file: Path, tmp_path: Path
) -> None:
    released, back = tmp_path / "released", tmp_path / "back"
    convert(megamem, saved_run, released, "--format", "released")
    config = tmp_path / "table.yaml"
    config.write_text(f"base: {config_file}\nmodel: {{memory: {{shuffle: table}}}}\n")
    refused = megamem("checkpoint", "inspect", released)
    assert refused.code == 2
    assert "--config" in refused.output
    convert(megamem, released, back, "--config", config)
    stored, original = tensors(checkpoint(back, 0)), tensors(checkpoint(saved_run, 6))
    shared = {name for name in stored if f"optimizer.state.param.{name}" in original}
    assert "banks.0.values" in shared
    for name in shared:
        assert torch.equal(stored[name], original[f"optimizer.state.param.{name}"]), name


def test_what_a_format_cannot_hold_is_refused(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    for args, text in (
        (("--format", "huggingface", "--with-optimizer"), "--with-optimizer"),
        (("--format", "huggingface", "--tensor", 2), "--tensor has no effect on --format huggingface"),
        (("--format", "released", "--pipeline", 2), "--pipeline has no effect on --format released"),
        (("--config", saved_run / "config.yaml"), "has a configuration of its own"),
    ):
        result = megamem("checkpoint", "convert", saved_run, tmp_path / "out", *args)
        assert result.code == 2, result.output
        assert text in result.output
        assert not list(tmp_path.iterdir())


MAIN, SIZES = "optimizer.state.param.", ("tensor", "pipeline", "virtual_pipeline", "memory")
SINGULAR_VECTORS = ("tucker_core_u", "tucker_core_v", ".u", ".v")
# Every two values of two options meet in one of them, as far as they go together.
CONVERSIONS = (
    "megatron-dist --dtype bf16 --with-optimizer --tensor 2 --pipeline 2 --max-file-size 64KiB",
    "megatron-dist --dtype bf16 --weights-only --pipeline 2 --virtual-pipeline 2 --memory 2",
    "megatron-dist --dtype fp32 --pipeline 4 --max-file-size 64KiB",
    "megatron-dist --weights-only --tensor 2 --memory 2 --max-file-size 64KiB",
    "megatron-dist --with-optimizer --memory 2 --pipeline 2",
    "huggingface --dtype bf16 --max-file-size 64KiB",
    "huggingface --dtype fp32 --weights-only",
    "released --dtype bf16 --weights-only --max-file-size 64KiB",
    "released --dtype fp32",
)


def elements(tensor: torch.Tensor) -> bytes:
    """The numbers of a tensor in their order, by which it is known under any name and shape."""
    return tensor.flatten().float().sort().values.numpy().tobytes()


@pytest.mark.parametrize("options", in_rotation(CONVERSIONS))
def test_other_readers_find_what_two_options_ask_for(saved_run: Path, tmp_path: Path, options: str) -> None:
    """Numbers of the run's checkpoint, in the dtype that was asked for, by the readers of PyTorch and safetensors."""
    words = options.split()
    asked = dict(zip(words, [*words[1:], ""], strict=True))
    dtype = torch.bfloat16 if asked.get("--dtype") == "bf16" else torch.float32
    out = tmp_path / 'it\'s "gemacht", für #1'
    assert main(["checkpoint", "convert", str(saved_run), str(out), "--format", *words]) == 0
    original = tensors(checkpoint(saved_run, 6))
    weights = {name.removeprefix(MAIN): main for name, main in original.items() if name.startswith(MAIN)}
    match words[0]:
        case "megatron-dist":
            check_layout(out, asked)
            found = tensors(checkpoint(out, 6))
            state = {name for name in original if name.startswith("optimizer.state.")}
            assert {name for name in found if name in state} == (set() if "--weights-only" in words else state)
            assert all(torch.equal(found[name], original[name]) for name in found.keys() & original.keys())
            found = {name: tensor for name, tensor in found.items() if name not in original}
            assert found.keys() == (weights.keys() if "--weights-only" in words else set())
            assert all(torch.equal(found[name], weights[name].to(dtype)) for name in found)
            files = list(checkpoint(out, 6).glob("*.distcp"))
        case "huggingface":
            files = sorted(out.glob("*.safetensors"))
            found = {name: tensor for file in files for name, tensor in load_file(file).items()}
            if len(files) > 1:
                index = json.loads((out / "model.safetensors.index.json").read_text())
                assert {name: (out / file) for name, file in index["weight_map"].items()} == {
                    name: file for file in files for name in load_file(file)
                }
            assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        case _:
            files = [out / "model.pt"]
            found = torch.load(files[0], weights_only=True)
    # Singular vectors are computed anew from cores, in fp32.
    weighing = {name for name, tensor in found.items() if tensor.is_floating_point()}
    assert {found[name].dtype for name in weighing if not name.endswith(SINGULAR_VECTORS)} <= {dtype}
    if words[0] != "megatron-dist":
        there = {elements(tensor) for tensor in found.values()}
        # Those that no format cuts or pads; releases have the tables of all banks in one.
        whole = [main for name, main in weights.items() if name.endswith(("proj.weight", "fc2.weight"))]
        for table in ("values", "pre_values"):
            banks = [main for name, main in weights.items() if name.endswith(f".{table}")]
            whole += [torch.cat(banks)] if words[0] == "released" else banks
        assert len(whole) >= 10
        assert all(elements(main.to(dtype)) in there for main in whole)
    if words[0] != "released":
        assert (len(files) > 2) == ("--max-file-size" in asked)


def check_layout(run: Path, asked: dict[str, str]) -> None:
    """A conversion's configuration, and the parts in which its index has a table and a projection."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    sizes = {name: int(asked.get(f"--{name.replace('_', '-')}", 1)) for name in SIZES}
    assert {name: config["parallel"].get(name, 1) for name in SIZES} == sizes
    assert config["train"].get("precision", "fp32") == asked.get("--dtype", "fp32")
    index = torch_checkpoint.FileSystemReader(checkpoint(run, 6)).read_metadata().state_dict_metadata
    prefix = "" if "--weights-only" in asked else MAIN
    for name, parts in (
        ("banks.0.values", sizes["memory"]),
        ("decoder.layers.0.self_attention.linear_proj.weight", sizes["tensor"]),
    ):
        entry = index[prefix + name]
        assert isinstance(entry, TensorStorageMetadata)
        assert {chunk.sizes[1] for chunk in entry.chunks} == {entry.size[1] // parts}
