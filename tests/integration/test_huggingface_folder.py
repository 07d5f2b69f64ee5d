"""A trained run's folder in the hands of others: transformers without this package, its tokenizer, and lm_eval."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from commands import Megamem, checkpoint
from exported import export, write_safetensors

from pretrain.checkpoint.folder import read_state
from pretrain.checkpoint.store.safetensors_store import open_safetensors
from pretrain.checkpoint.store.tensors import Region, TensorInfo, TensorReader
from pretrain.convert.huggingface.card import figures_of
from pretrain.convert.registry import open_checkpoint
from pretrain.data.manifest import open_saved_tokenizer
from pretrain.run.folder import RunFolder
from tests.costly import COSTLY
from tests.rotation import in_turn

transformers = pytest.importorskip("transformers", reason="exported models are loaded with it: pip install '.[hf]'")
pytestmark = pytest.mark.usefixtures("remote_code_cache")

# Takes this package away from a process whose environment it is installed in.
STRANGER = """
import importlib.util, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
for name in ("kernels", "megamem", "parallel", "pretrain", "tools"):
    assert importlib.util.find_spec(name) is None, name
"""


def as_a_stranger(code: str, cwd: Path, *words: object) -> str:
    """The output of Python code in a process of its own, without this package and without a network."""
    home = {"HF_HOME": str(cwd / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, "-c", STRANGER + code, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **home},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained run's last checkpoint, exported."""
    path = tmp_path_factory.mktemp("huggingface")
    saved, run = read_state(checkpoint(trained, 160)), RunFolder(trained)
    opened = open_checkpoint(trained, 160)
    tokenizer = open_saved_tokenizer(run.tokenizer)
    export(
        opened.config,
        opened.reader,
        path,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        figures=figures_of(saved.run, run.metrics),
        max_file_bytes=100_000,
    )
    return path


def test_a_folder_has_what_it_needs(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"),
        *(
            f"{part}_megamem.py"
            for part in (
                *("attention", "configuration", "memory", "modeling", "ngrams", "pages", "streams", "token_tables"),
            )
        ),
        "model.safetensors.index.json",
    }
    assert len([name for name in names if name.endswith(".safetensors")]) > 2


@pytest.fixture(scope="module")
def stranger(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Words of one process about the folder, and about one that lacks a table."""
    code = """
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, lacking = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(tokenizer.eos_token + "import é", return_tensors="pt")
out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
said = {"text": tokenizer.decode(out[0, inputs.input_ids.shape[1]:], skip_special_tokens=True)}
try:
    AutoModelForCausalLM.from_pretrained(lacking, trust_remote_code=True)
except ValueError as error:
    said["error"] = str(error)
print(json.dumps(said))
"""
    cwd = tmp_path_factory.mktemp("stranger")
    reader, lacking = open_safetensors(folder), cwd / "lacking"
    lacking.mkdir()
    for path in folder.iterdir():
        if "safetensors" not in path.name:
            shutil.copy(path, lacking)
    infos = {name: info for name, info in reader.tensors.items() if name != "model.banks.0.values"}
    write_safetensors(lacking, _Grown(reader, infos, set()), 2**27)
    said: dict[str, str] = json.loads(as_a_stranger(code, cwd, folder, lacking).splitlines()[-1])
    return said


@in_turn(0)
def test_it_generates_what_the_run_generates(stranger: dict[str, str], trained: Path, megamem: Megamem) -> None:
    options = ("--prompt", "import é", "--temperature", "0", "--max-tokens", "12")
    ours = megamem("generate", trained, *options)
    assert ours.code == 0, ours.output
    assert len(stranger["text"]) > 4
    assert ascii(stranger["text"])[1:-1] in ascii(ours.output)


def test_its_tokenizer_makes_the_ids_of_training(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    every_byte = "".join(map(chr, range(0x250))) + "\u4e2d\U0001f600  two  spaces\n\n\ttab"
    assert tokenizer(every_byte).input_ids == list(every_byte.encode())
    assert tokenizer.decode(list(every_byte.encode())) == every_byte
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 256


def test_its_card_has_the_figures_of_the_checkpoint(folder: Path, trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    loss = next(row["loss"] for row in rows if row.get("step") == 160 and "loss" in row)
    (validation,) = (row for row in rows if "validation_loss" in row)
    card = (folder / "README.md").read_text()
    assert "| steps | 160 |" in card
    assert f"| tokens | {160 * 16 * 32:,} |" in card
    assert f"{loss:.4f} nats" in card
    assert f"{validation['validation_loss']:.4f} nats" in card
    assert f"{validation['bits_per_byte']:.4f} bits" in card
    front, shown = card.split("---")[1], card.split("```yaml")[1].split("```")[0]
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert yaml.safe_load(shown)["model"]["memory"]["num_keys"] == 32
    assert str(trained.parent) not in card


@in_turn(1)
def test_tables_in_their_files_take_no_memory(folder: Path, tmp_path: Path) -> None:
    """Neither as parameters, which go to the device, nor in the host's memory beyond the pages that were read."""
    code = """
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
def resident():
    return int(next(line for line in Path("/proc/self/status").open() if line.startswith("VmRSS")).split()[1]) * 1024
def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, memory_device="cpu")
    model(torch.arange(32).unsqueeze(0))
    return model
small = load(sys.argv[1])
before = resident()
large = load(sys.argv[2])
after = resident()
print(after - before, sum(p.numel() * p.element_size() for p in (*large.parameters(), *large.buffers())))
print(sum(table.nbytes for bank in large.model.banks.values() for table in bank.on_host.values()))
"""
    # The same model, with a bank that goes on after the window that its layers see.
    reader, large = open_safetensors(folder), tmp_path / "large"
    large.mkdir()
    for path in folder.iterdir():
        if "safetensors" not in path.name:
            shutil.copy(path, large)
    config = json.loads((large / "config.json").read_text())
    name, num_rows = "model.banks.0.values", 2**21
    width = config["memory"]["tables"]["values"]
    config["memory"]["bank_rows"][0] = num_rows
    (large / "config.json").write_text(json.dumps(config))
    rows = {f"model.banks.0.{table}": num_rows for table in config["memory"]["tables"]}
    infos = {
        name: TensorInfo((rows.get(name, info.shape[0]), *info.shape[1:]), info.dtype)
        for name, info in reader.tensors.items()
    }
    table_bytes = infos[name].num_bytes
    assert table_bytes == num_rows * width * 4 >= 2**28
    write_safetensors(large, _Grown(reader, infos, set(rows)), 2**27)
    grown, own_bytes, *_, on_host = map(int, as_a_stranger(code, tmp_path, folder, large).split())
    assert on_host > table_bytes
    assert own_bytes < table_bytes / 100
    assert grown < table_bytes / 10


def test_a_folder_that_lacks_weights_is_no_model(stranger: dict[str, str]) -> None:
    """transformers draws random ones in their place, with a warning among others."""
    assert "is damaged: its files lack model.banks.0.values" in stranger["error"]


class _Grown:
    """A reader's tensors, some of which are larger, and the same number everywhere."""

    def __init__(self, reader: TensorReader, tensors: Mapping[str, TensorInfo], grown: set[str]) -> None:
        self._reader, self.tensors, self._grown = reader, tensors, grown

    def read(self, region: Region) -> torch.Tensor:
        return torch.full(region.shape, 0.01) if region.name in self._grown else self._reader.read(region)


OLDEST = ("transformers==5.5.0", "huggingface-hub==1.5.0", "tokenizers==0.22.2")
NEWEST = ("transformers>=5.5,<6", "huggingface-hub", "tokenizers")


@COSTLY
@pytest.mark.parametrize("packages", [OLDEST, NEWEST], ids=["oldest", "newest"])
def test_it_generates_and_trains_with_other_versions_of_transformers(
    folder: Path, tmp_path: Path, packages: tuple[str, ...]
) -> None:
    """Greedy tokens with the cache are those of whole texts, and the gradients of recomputed blocks those of kept ones."""
    code = """
sys.path.insert(0, sys.argv[2])
import torch, transformers
assert transformers.__file__.startswith(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = whole = torch.arange(30, 90).view(3, 20)
for _ in range(12):
    whole = torch.cat([whole, model(whole).logits[:, -1:].argmax(-1)], 1)
options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
assert torch.equal(model.generate(tokens, **options), whole)
gradients = []
model.train()
for recompute in (False, True):
    model.gradient_checkpointing_enable() if recompute else None
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
assert torch.equal(*gradients)
"""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages")]
    subprocess.run([*pip, *packages], check=True, timeout=240)
    as_a_stranger(code, tmp_path, folder, tmp_path / "packages")


@COSTLY
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install '.[dev]'"
)
def test_lm_eval_runs_on_it_as_it_is(folder: Path, tmp_path: Path) -> None:
    """The figure of lm-eval is that of the logits: a text's bits per byte after the end of another document."""
    texts = ["def f(x):\n    return x\n", "import os\n", "class A: pass"]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = {
        "task": "some_documents",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "some_documents.yaml").write_text(yaml.safe_dump(task))
    words = (
        *("--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True"),
        *("--tasks", "some_documents", "--include_path", tmp_path / "tasks"),
        *("--device", "cpu", "--batch_size", "2", "--output_path", tmp_path / "out"),
    )
    run = "import runpy; sys.argv[0] = 'lm_eval'; runpy.run_module('lm_eval', run_name='__main__')"
    as_a_stranger(run, tmp_path, *words)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["some_documents"]["bits_per_byte,none"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            nats += torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
    assert found == pytest.approx(nats / math.log(2) / sum(len(text) for text in texts), rel=1e-4)
