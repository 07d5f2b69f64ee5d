"""The page for newcomers, docs/your-own-model.md: its files and its commands are run as they stand there, briefly."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Megamem, Result, last_step

from megamem.families.registry import FAMILIES
from pretrain.checkpoint.store import torch_dist_writer
from pretrain.config.stages import load_config
from pretrain.planning.counts.formulas import forward_flops_per_token
from tests.rotation import in_rotation

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-model.md").read_text(encoding="utf-8")
FILES = {
    text.splitlines()[0].removeprefix("# "): text for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
}
COMMANDS = [
    line for block in re.findall(r"```\n(megamem.*?)```", PAGE, flags=re.DOTALL) for line in block.strip().splitlines()
]
GROWN = next(line for line in COMMANDS if line.startswith("megamem upscale "))
# Those that the page trains by a command of its own; of the others it says that they are trained by their names.
NAMED = [name for name in FILES if any(f" {name}" in line for line in COMMANDS)]
BRIEF = (
    "train.num_steps=2",
    "train.global_batch_size=1",
    "train.micro_batch_size=1",
    "train.sequence_length=32",
    "optimizer.warmup_steps=1",
    "evaluation.max_sequences=2",
)


class Newcomer:
    """Somebody with the page's files and a small corpus in a folder."""

    def __init__(self, folder: Path, megamem: Megamem) -> None:
        self.folder, self._megamem = folder, megamem
        (folder / "corpus").mkdir()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a[b-s]*.py")):
            shutil.copy(path, folder / "corpus")
        for name, text in FILES.items():
            (folder / name).write_text(text)

    def types(self, line: str) -> Result:
        """Run a command; training takes two short steps."""
        _, *words = shlex.split(line)
        brief = BRIEF if words[0] == "train" else ()
        result = self._megamem(*words, *brief, before=lambda: os.chdir(self.folder))
        assert result.code == 0, f"{line}\n{result.output}"
        return result


@pytest.fixture(scope="module", autouse=True)
def large_parts() -> Iterator[None]:
    """Parts of checkpoints as shipped: models of the page are larger than those of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dist_writer, "MAX_PART_BYTES", 16 * 2**20)
        yield


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem) -> Newcomer:
    """The commands of the page in their order, up to the first trained model, which others build on."""
    newcomer = Newcomer(tmp_path_factory.mktemp("newcomer"), megamem)
    for line in COMMANDS:
        newcomer.types(line)
        if line.startswith("megamem train "):
            return newcomer
    raise AssertionError("the page trains nothing")


def test_there_is_a_file_for_every_family() -> None:
    """The files and the grown models cover every kind of memory, a dense model and a mixture of experts."""
    models: list[dict[str, Any]] = [yaml.safe_load(text).get("model", {}) for text in FILES.values()]
    kinds = {model["memory"]["kind"] for model in models if "memory" in model}
    kinds |= set(re.findall(r"model\.memory\.kind=(\w+)", GROWN))
    assert kinds == set(FAMILIES)
    assert any("moe" in model for model in models)
    assert any(model and "memory" not in model and "moe" not in model for model in models)


def test_all_cost_what_the_dense_model_costs(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    costs = {}
    for name in FILES:
        if not yaml.safe_load(FILES[name])["name"].startswith("midus"):
            config = load_config(tmp_path / name)
            model = replace(config.model, vocab_size=4096)
            costs[name] = forward_flops_per_token(model, config.train.sequence_length)
    assert costs == {name: pytest.approx(costs["dense.yaml"], rel=0.01) for name in costs}


def test_the_commands_do_what_the_page_says(newcomer: Newcomer) -> None:
    first = next(place for place, line in enumerate(COMMANDS) if line.startswith("megamem train ")) + 1
    said = {line: newcomer.types(line).output for line in COMMANDS[first:]}
    (evaluated,) = (output for line, output in said.items() if line.startswith("megamem eval "))
    for words in ("bits per byte", "this model without its memory", "gzip", "xz"):
        assert words in evaluated, evaluated
    (status,) = (output for line, output in said.items() if line == "megamem status")
    assert [status.count(f"runs/{name}") > 0 for name in ("dense", "mine")] == [True, True]
    for path in ("runs/mine/plot.png", "runs/mine/report.html", "runs/grown/train.yaml"):
        assert (newcomer.folder / path).stat().st_size > 0
    assert last_step(newcomer.folder / "runs" / "midus") == 2


@pytest.mark.parametrize("name", in_rotation([name for name in FILES if name not in NAMED]))
def test_every_other_file_trains_by_its_name(newcomer: Newcomer, name: str) -> None:
    newcomer.types(f"megamem train {name}")
    run = newcomer.folder / "runs" / Path(name).stem
    assert last_step(run) == 2
    # A model that was tried takes no space.
    shutil.rmtree(run)


def test_the_page_has_commands_and_every_file_is_trained() -> None:
    assert {line.split()[1] for line in COMMANDS} >= {"data", "train", "eval", "generate", "plot", "report", "upscale"}
    assert {"dense.yaml", "mine.yaml", "midus.yaml"} <= set(NAMED) < set(FILES)
