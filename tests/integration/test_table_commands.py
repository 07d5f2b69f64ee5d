"""Token tables in other forms: made, evaluated and generated from, as a person would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Megamem

from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from tests.rotation import in_rotation

MEMORIES = {
    "tide": ("model.memory.value_dim=32", "model.memory.num_tables=3"),
    "move": ("model.memory.value_dim=16", "model.memory.num_slots=2", "model.memory.num_gate_heads=2"),
    "stem": ("model.memory.value_dim=32", "model.memory.placement.blocks=[1]"),
    "mome": ("model.memory.value_dim=8", "model.memory.num_heads=2", "model.memory.gate_channels=8"),
    "lave": ("model.memory.value_dim=16", "model.memory.num_gate_heads=2"),
}


@pytest.fixture(scope="module")
def dense_file(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> Path:
    """The tiny model's configuration without its memory, and with a short text to evaluate."""
    folder = tmp_path_factory.mktemp("held_out")
    (folder / "text.txt").write_text(Path(json.__file__).read_text(encoding="utf-8")[:1200])
    # Of a data set that holds nothing out, all is evaluated.
    prepare([str(folder / "text.txt")], folder / "text", ByteTokenizer(), validation_fraction=0, num_workers=1)
    content = yaml.safe_load(config_file.read_text())
    content["evaluation"] = {"datasets": [{"path": str(folder / "text")}]}
    del content["model"]["memory"]
    for key in ("value_lr_multiplier", "value_lr_end_multiplier", "pre_value_lr_multiplier"):
        del content["optimizer"][key]
    path = tmp_path_factory.mktemp("dense") / "dense.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def train(megamem: Megamem, config_file: Path, run: Path, kind: str, *options: str) -> Path:
    memory = (f"model.memory.kind={kind}", *MEMORIES[kind])
    fixed = ("model.num_layers=2", "train.num_steps=6", "checkpoint.every_steps=4", "optimizer.lr=1e-2")
    result = megamem("train", config_file, "--run-dir", run, *memory, *fixed, *options)
    assert result.code == 0, result.output
    return run


@pytest.fixture(scope="module")
def tide(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, dense_file: Path) -> Path:
    return train(megamem, dense_file, tmp_path_factory.mktemp("tide") / "run", "tide")


def evaluate(megamem: Megamem, run: Path, *options: object) -> dict[str, Any]:
    result = megamem("eval", run, "--json", *options)
    assert result.code == 0, result.output
    row: dict[str, Any] = json.loads(result.last_line)
    return row


@pytest.mark.parametrize(
    ("kind", "precision"),
    in_rotation([("tide", "bf16"), ("move", "fp32"), ("lave", "bf16"), ("stem", "bf16"), ("mome", "fp32")]),
)
def test_each_form_costs_what_it_should(
    megamem: Megamem, dense_file: Path, tmp_path: Path, kind: str, precision: str
) -> None:
    run = train(megamem, dense_file, tmp_path / "run", kind, f"train.precision={precision}")
    plain = evaluate(megamem, run, "--nproc", 1)
    folders = {form: str(tmp_path / form.replace(":", "_")) for form in ("int4", "rank:1")}
    for form, folder in folders.items():
        result = megamem("tables", run, "--form", form, "--output", folder)
        assert result.code == 0, result.output
    forms = ",".join(["full", "int8", "int4", "rank:1", "cut:0", *folders.values()])
    rows = evaluate(megamem, run, "--nproc", 1, "--tables", forms)["tables"]
    nats = {form: row["validation_loss"] for form, row in rows.items()}
    # Rows that are fetched are those that are there, to the bit; so are those from a file.
    assert nats["full"] == plain["validation_loss"]
    assert nats["cut:0"] == pytest.approx(nats["full"], abs=2e-3 if precision == "bf16" else 1e-5)
    assert 0 < abs(nats["int8"] - nats["full"]) < abs(nats["rank:1"] - nats["full"])
    size = {form: row["table_bytes"] for form, row in rows.items()}
    assert size["full"] > size["int8"] > size["int4"]
    for form, folder in folders.items():
        assert nats[folder] == nats[form]
        on_disk = sum(path.stat().st_size for path in Path(folder).glob("bank_*"))
        assert size[form] == size[folder] == on_disk


def test_tables_are_fetched_by_ranks_that_split_them(megamem: Megamem, dense_file: Path, tmp_path: Path) -> None:
    run = train(megamem, dense_file, tmp_path / "move", "move", "parallel.tensor=2", "parallel.memory=2")
    whole, split = (
        evaluate(megamem, run, *options, "--tables", "full,int8")["tables"]
        for options in (("--nproc", 1), ("--own-layout", "--nproc", 2))
    )
    for form, row in split.items():
        assert row["validation_loss"] == pytest.approx(whole[form]["validation_loss"], rel=1e-5)


def test_what_cannot_be_is_told(megamem: Megamem, tide: Path, saved_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    assert megamem("tables", tide, "--form", "int8", "--output", folder).code == 0
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    with (damaged / "bank_0.rows").open("ab") as stream:
        stream.write(b"x")
    empty = tmp_path / "empty"
    shutil.copytree(folder, empty)
    (empty / "tables.json").write_text("{}")
    cases: tuple[tuple[int, str, tuple[object, ...]], ...] = (
        (2, "there is no form 'int2' of a table", ("eval", tide, "--tables", "int2")),
        (2, "rows have 32 columns: ask for 1 to 32", ("eval", tide, "--tables", "rank:33")),
        (2, "this model has one of kind ultramem_v2", ("eval", saved_run, "--tables", "int8")),
        (
            2,
            "this model has one of kind ultramem_v2",
            ("tables", saved_run, "--form", "int8", "--output", tmp_path / "new"),
        ),
        (2, "which is there: name a folder that is not", ("tables", tide, "--form", "int8", "--output", folder)),
        (2, "--tables or --form is", ("generate", tide, "--tables", empty)),
        (4, "of another checkpoint", ("generate", tide, "--step", 4, "--tables", folder)),
        (4, "bytes where", ("generate", tide, "--tables", damaged)),
    )
    for code, message, words in cases:
        result = megamem(*words)
        assert message in " ".join(result.output.split()), result.output
        assert result.code == code
