"""Reasons that keep a run from starting are said at once: before ranks start or torch or Megatron is imported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import pretrain.run.preflight as preflight_module
from pretrain.checkpoint import folder as checkpoints
from pretrain.config.loader import to_dict
from pretrain.config.stages import load_config
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.planning.counts.formulas import count_parameters
from pretrain.run.folder import RunFolder
from tools import cli

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number} " * 20)
    prepare([str(folder)], folder / "set", ByteTokenizer(), validation_fraction=0.2, num_workers=1)
    return folder / "set"


@pytest.fixture
def config_file(tmp_path: Path, dataset: Path) -> Path:
    path = tmp_path / "a.yaml"
    train = {"num_steps": 7, "sequence_length": 64}
    path.write_text(
        json.dumps({"train": train, "model": {"memory": {}}, "data": {"datasets": [{"path": str(dataset)}]}})
    )
    return path


def check(config_file: Path, *words: object) -> int:
    return cli.main(["config", "check", str(config_file), *map(str, words)])


def test_what_can_run_can_run_here(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(config_file, "--run-dir", tmp_path / "runs" / "new", "--ranks", 1) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{config_file} can run on 1 rank here."
    assert re.fullmatch(
        r"Each rank holds [\d.]+ GB of weights and gradients and [\d.]+ GB of the optimizer's .*", second
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["data.datasets.0.path=nowhere"], 3, "nowhere: no such data set. Make it with `megamem data prepare"),
        (["data.datasets=[]"], 3, "The configuration names no data"),
        (["train.sequence_length=100000"], 3, "a sequence of 100000 needs 100001"),
        (["model.vocab_size=100"], 2, "model.vocab_size is 100, but the data sets' tokenizer has 257 ids"),
        (["model.hidden_size=1000000000000", "model.num_attention_heads=4"], 2, "and this machine has"),
        (
            ["model.memory.num_keys=1000000"],
            2,
            "in tables), which with their gradients and optimizer state need at least",
        ),
        (["parallel.tensor=3"], 2, "parallel.tensor"),
        (["--run-dir", "FILE/run"], 2, "is no folder"),
        (
            ["train.num_steps=1e30", "data.shuffle=samples"],
            2,
            "in which a run reads more than 9,223,372,036,854,775,807 tokens: lower it",
        ),
        (["train.num_steps=1e30"], 2, "in which a run reads more than 9,223,372,036,854,775,807 tokens: lower it"),
        (
            ["train.num_steps=1e12"],
            2,
            "an order of documents has 2,147,483,647 at most: lower it, or take data.shuffle",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_run_is_told(
    config_file: Path, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(config_file, *(word.replace("FILE", str(config_file)) for word in words)) == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_a_dense_model_needs_at_least_is_counted(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas of weights and gradients, 4 bytes each, and 8 bytes of moments once: main weights are the fp32 weights."""
    keys = ("model.memory=null", "model.vocab_size=257", "--ranks", 2)
    num_weights = count_parameters(load_config(config_file, ["model.memory=null", "model.vocab_size=257"]).model).total
    needed = num_weights * (2 * (4 + 4) + 8)
    monkeypatch.setattr(preflight_module, "machine_memory_bytes", lambda: needed)
    assert check(config_file, *keys) == 0
    monkeypatch.setattr(preflight_module, "machine_memory_bytes", lambda: needed - 1)
    assert check(config_file, *keys) == 2
    assert f"the model has {num_weights:,} parameters (0 in tables)" in " ".join(capsys.readouterr().err.split())


def test_an_order_without_an_index_may_be_long(config_file: Path) -> None:
    assert check(config_file, "train.num_steps=1e12", "data.shuffle=samples") == 0


TOKENS = {
    "tide": ("value_dim=128", "num_tables=2"),
    "move": ("value_dim=128", "num_gate_heads=4"),
    "lave": ("value_dim=128", "num_gate_heads=4"),
    "stem": ("value_dim=96",),
    "mome": ("value_dim=32", "num_heads=4"),
}


@pytest.mark.parametrize("kind", TOKENS)
def test_tables_of_token_ids_follow_the_tokenizer(
    config_file: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are 257 ids here; a table may have rows for more, and not for fewer."""
    words = [f"model.memory.{word}" for word in (f"kind={kind}", *TOKENS[kind])]
    assert check(config_file, *words) == 0
    left_to_it = capsys.readouterr().out
    assert check(config_file, *words, "model.vocab_size=257", "model.memory.vocab_size=257") == 0
    assert capsys.readouterr().out == left_to_it
    assert check(config_file, *words, "model.memory.vocab_size=100000") == 0
    assert capsys.readouterr().out != left_to_it
    for more in ((), ("model.vocab_size=257",)):
        assert check(config_file, *words, "model.memory.vocab_size=256", *more) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "model.memory.vocab_size is 256, but there are 257 token ids" in said
        assert "set model.memory.vocab_size: null, and it follows" in said


def test_another_machine_decides_for_itself(config_file: Path) -> None:
    assert check(config_file, "--elsewhere", "data.datasets=[]") == 0
    assert check(config_file, "--elsewhere", "model.memory.num_keys=1000000") == 0


def test_replicas_need_memory_of_their_own(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 bytes of weight and gradient per replica, 8 of moments once; the tables but once."""
    monkeypatch.setattr(preflight_module, "machine_memory_bytes", lambda: 0)
    needed = []
    for ranks in (1, 2, 4):
        assert check(config_file, "--ranks", ranks, "train.global_batch_size=8", "train.micro_batch_size=1") == 2
        words = capsys.readouterr().err.replace(",", "").split()
        needed.append(float(words[words.index("least") + 1]))
        total, tables = int(words[words.index("parameters") - 1]), int(words[words.index("tables)") - 2].strip("("))
        assert needed[-1] == pytest.approx((16 * tables + (8 + 8 * ranks) * (total - tables)) / 1e9, abs=0.051)


LARGE = "configs/ultramemv2/2.5b_25b.yaml"


def elsewhere(ranks: int, gpu_gigabytes: float, *overrides: str) -> int:
    words = ["--elsewhere", "--ranks", str(ranks), "--gpu-memory", str(gpu_gigabytes), *overrides]
    return cli.main(["config", "check", str(REPOSITORY / LARGE), *words])


def test_a_layout_that_a_gpu_cannot_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """25B parameters as shipped are for 128 GPUs: 6 bytes of a quarter of them, and 12 of an eighth, on eight."""
    assert elsewhere(128, 80) == 0
    assert (
        "A rank of the fullest stage holds 38.3 GB of weights and gradients and 2.39 GB of" in capsys.readouterr().out
    )
    assert elsewhere(8, 70) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "hold 76.6 GB (38.3 GB of weights and gradients, 38.3 GB as its share" in said
    assert "on 8 ranks, and a GPU has 70 GB, of which activations need some: parallel.memory=2 splits tables" in said
    assert elsewhere(8, 70, "parallel.memory=2") == 0
    assert elsewhere(8, 30) == 2
    assert "raise parallel.pipeline, use more GPUs, or make the model smaller" in " ".join(
        capsys.readouterr().err.split()
    )
    assert cli.main(["config", "check", str(REPOSITORY / LARGE), "--gpu-memory", "80"]) == 2
    assert "needs --elsewhere and --ranks" in " ".join(capsys.readouterr().err.split())


def test_tables_that_are_stepped_on_the_host_leave_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert elsewhere(8, 70, "optimizer.value_offload=cpu") == 0
    said = capsys.readouterr().out
    assert "38.3 GB of weights and gradients and 4.5" in said


def test_the_gpus_of_this_machine_are_asked(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight_module, "num_visible_gpus", lambda: 1)
    monkeypatch.setattr(preflight_module, "version", lambda _: "2.13.0+cu130")
    for size, code in ((80 * 10**9, 0), (10**6, 2)):
        monkeypatch.setattr(preflight_module, "smallest_gpu_bytes", lambda size=size: size)
        assert check(config_file, "--run-dir", tmp_path / "run", "--ranks", 1) == code
    assert "a GPU has 0.001 GB" in " ".join(capsys.readouterr().err.split())


def test_a_folder_of_another_run_is_found_before_it_starts(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    checkpoints.start_writing(folder.checkpoints, 3)
    saved = to_dict(load_config(config_file))
    checkpoints.complete(
        folder.checkpoints, 3, run={"step": 3}, rng={}, config=saved, versions={}, weights_dtype="float32"
    )
    assert check(config_file, "--run-dir", folder.path) == 0
    for command in (["config", "check"], ["train"]):
        assert cli.main([*command, str(config_file), "--run-dir", str(folder.path), "model.hidden_size=64"]) == 4
        assert "is of another run: model.hidden_size: " in capsys.readouterr().err


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="torch has CUDA here")
def test_gpus_without_a_torch_for_them_are_told_at_once(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert check(config_file) == 2
    assert "this machine has GPUs that cannot be used: torch" in capsys.readouterr().err
    assert check(config_file, "--device", "cpu") == 0
    assert "can run on 1 rank here" in capsys.readouterr().out


def test_a_relative_path_that_leads_nowhere_from_here(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is looked for beside the configuration, and in the folders above."""
    project, elsewhere = tmp_path / "my project", tmp_path / "elsewhere"
    (project / "configs").mkdir(parents=True)
    elsewhere.mkdir()
    moved = shutil.copy(config_file, project / "configs")
    monkeypatch.chdir(elsewhere)

    def said(*overrides: str) -> str:
        assert check(Path(moved), *overrides) == 3
        return " ".join(capsys.readouterr().err.split())

    counts = f"A relative path counts from the folder in which the command starts, {elsewhere}"
    text = said("data.datasets.0.path=data/mine")
    assert text.startswith(f"megamem: error: {elsewhere}/data/mine: no such data set.")
    assert text.endswith(f"{counts}.")
    dataset = shutil.copytree(yaml.safe_load(config_file.read_text())["data"]["datasets"][0]["path"], project / "mine")
    assert said("data.datasets.0.path=mine").endswith(
        f"{counts}: there is {dataset}, so start it in {project}, or give that path."
    )
    assert "relative path" not in said("data.datasets.0.path=/nowhere/mine")
    stages = project / "configs" / "stages.yaml"
    stages.write_text(f"base: {moved}\nstages: [{{name: first, num_steps: 7}}]")
    assert check(stages, "data.datasets.0.path=mine") == 3
    of_stage = " ".join(capsys.readouterr().err.split())
    assert of_stage.startswith(f"megamem: error: stage first: {elsewhere}/mine: no such data set")
    assert f"{counts}: there is {dataset}, so start it in {project}" in of_stage
    monkeypatch.chdir(project)
    assert check(Path("configs") / Path(moved).name, "data.datasets.0.path=mine") == 0


MISTAKES = [
    ["train", "CONFIG", "data.datasets.0.path=nowhere"],
    ["train", "CONFIG", "model.hidden_sise=64"],
    ["train", "CONFIG", "parallel.tensor=3"],
    ["train", "CONFIG", "--run-dir", "/proc/none/run"],
    ["train", "none.yaml"],
    ["eval", "nowhere"],
    ["eval", "RUN", "--step", "5"],
    ["generate", "nowhere"],
    ["generate", "RUN", "--temperature", "-1"],
    ["generate", "RUN", "--prompt-file", "nowhere"],
    ["checkpoint", "convert", "SAVED", "RUN"],
    ["checkpoint", "convert", "nowhere", "new"],
    ["checkpoint", "convert", "SAVED", "new", "--step", "4"],
    ["checkpoint", "convert", "SAVED", "new", "--tables", "int4"],
    ["checkpoint", "convert", "SAVED", "new", "--max-memory", "1MiB"],
    ["checkpoint", "verify", "nowhere"],
    ["checkpoint", "diff", "SAVED", "nowhere"],
    ["patch", "make", "nowhere", "SAVED", "--output", "new"],
    ["patch", "make", "SAVED", "SAVED", "--output", "RUN"],
    ["patch", "make", "SAVED", "SAVED", "--output", "/proc/none/new"],
    ["patch", "show", "nowhere"],
    ["patch", "apply", "RUN", "SAVED"],
    ["patch", "apply", "CONFIG", "nowhere"],
    ["patch", "apply", "CONFIG", "SAVED", "--step", "4"],
    ["patch", "revert", "CONFIG", "SAVED", "--output", "RUN"],
    ["patch", "merge", "CONFIG", "--output", "new"],
    ["patch", "merge", "CONFIG", "nowhere", "--output", "new"],
    ["upscale", "nowhere", "--output", "new", "--blocks", "1", "--insert", "solar"],
    ["upscale", "SAVED", "--output", "RUN", "--blocks", "1", "--insert", "solar"],
    ["upscale", "SAVED", "--output", "new", "--blocks", "1", "kind=midus"],
    ["upscale", "SAVED", "--output", "new", "--blocks", "99", "--insert", "llama-pro"],
    ["upscale", "SAVED", "--output", "new", "--blocks", "1", "model.memory.kind=midus", "model.memory.num_heads=5"],
]


def test_the_commonest_mistakes_cost_no_import_of_torch(config_file: Path, tmp_path: Path) -> None:
    """One process takes them all, which would have torch from the first that imports it."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    saved = RunFolder(tmp_path / "saved")
    dense = to_dict(load_config(config_file, ["model.memory=null"]))
    checkpoints.start_writing(saved.checkpoints, 3)
    checkpoints.complete(
        saved.checkpoints, 3, run={"step": 3}, rng={}, config=dense, versions={}, weights_dtype="float32"
    )
    names = {"CONFIG": config_file, "RUN": run, "SAVED": saved.path}
    named = [[str(names.get(word, word)) for word in words] for words in MISTAKES]
    program = (
        "import sys\nfrom tools import cli\n"
        f"for words in {named!r}:\n"
        "    code = cli.main(words)\n"
        "    assert code in (2, 3, 4), (words, code)\n"
        "    assert not {'torch', 'megatron'} & set(sys.modules), words\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("megamem: error:") == len(MISTAKES)
