"""The papers' models in configs/: they load, run on the GPUs that they state, follow the paper's rules, and cost what
the closed formulas say.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from math import isnan
from pathlib import Path
from statistics import fmean

import pytest

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.planning.bytes.held import held_bytes
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.counts.equal_compute import core_measure, flops_measure, solve_ffn_width
from pretrain.planning.counts.formulas import count_parameters
from tests.rotation import in_rotation
from tests.unit.test_formulas import BuiltModel, built_models, check_costs
from tools import cli
from tools.parameter_table import PAPER, memory_share

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("ultramemv2", "ultramem", "memory_plus", "olmoe", "ablations")
PATHS = sorted(path for folder in FOLDERS for path in (REPOSITORY / "configs" / folder).glob("*.yaml"))
NAMES = [str(path.relative_to(REPOSITORY / "configs").with_suffix("")) for path in PATHS]
CONFIGS = {name: load_config(path) for name, path in zip(NAMES, PATHS, strict=True)}
MEMORIES = {name: config.model.memory for name, config in CONFIGS.items() if config.model.memory is not None}
V2 = {name: memory for name, memory in MEMORIES.items() if memory.kind == "ultramem_v2"}
ABLATIONS = [name for name in NAMES if name.startswith("ablations/")]
BASELINE = "ultramemv2/500m_6.8b"
# The other kinds of model at UltraMemV2's sizes, and the UltraMemV2 that each is like. Their names leave out what is
# retrieved.
PEERS = {
    f"{folder}/{name.split('/')[1].split('_top')[0]}": name
    for folder in ("ultramem", "memory_plus", "olmoe")
    for name in NAMES
    if name.startswith("ultramemv2/")
}
GIVEN = {f"{folder}/227m_1.2b" for folder in ("ultramem", "memory_plus", "olmoe")}
ENDS = [name for name in NAMES if name.endswith(("/227m_1.2b", "/2.5b_120b", "/2.5b_120b_top256"))]
"""The smallest and the largest of each series of sizes, which differ in numbers alone."""
BUILT = in_rotation([*ENDS, *ABLATIONS])
# A forward pass of these is counted: one ablation per table, and no experts, because fake tokens cannot be sorted by them.
PASSED = {name for name in MEMORIES if name in ENDS} | {
    "ablations/table4_dk880",
    "ablations/table5_1to8",
    "ablations/table7_s16_ring",
}

VOCAB = 50304


def to_build(name: str) -> ModelConfig:
    """The model, but of more than 64 experts two blocks: all are alike, and 24 have up to 12,480 experts, a module
    each.
    """
    model = CONFIGS[name].model
    return replace(model, num_layers=2) if model.moe is not None and model.moe.num_experts > 64 else model


@pytest.fixture(scope="module")
def built() -> dict[str, BuiltModel]:
    return built_models({name: to_build(name) for name in BUILT}, VOCAB, fake=True, forward=PASSED)


def test_every_model_of_the_paper_is_there() -> None:
    sizes = {folder: {name.split("/")[1] for name in NAMES if name.startswith(f"{folder}/")} for folder in FOLDERS}
    assert sizes["ultramemv2"] == {
        "227m_1.2b",
        "430m_5b",
        "500m_6.8b",
        "1b_7b",
        "1.25b_12.5b",
        "2.5b_25b",
        "2.5b_60b_top768",
        "2.5b_120b_top256",
    }
    others = {f"{folder}/{size}" for folder in ("ultramem", "memory_plus", "olmoe") for size in sizes[folder]}
    assert others == set(PEERS)
    assert len(ABLATIONS) == 7 + 2 + 7
    # A misspelt name would leave the paper's columns of the table empty.
    assert {config.name for config in CONFIGS.values()} >= set(PAPER)


@pytest.mark.parametrize("name", NAMES)
def test_it_can_run_on_the_gpus_that_it_states(name: str) -> None:
    text = (REPOSITORY / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    stated = re.search(r"^# For (\d+) GPUs", text, flags=re.MULTILINE)
    assert stated
    validate(CONFIGS[name], int(stated[1]))
    assert CONFIGS[name].name == name.replace("ablations/", "").replace("/", "-").replace("_", "-")
    assert (CONFIGS[name].model.vocab_size, CONFIGS[name].train.sequence_length) == (VOCAB, 4096)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ABLATIONS])
def test_a_gpu_holds_as_many_bytes_as_its_layout_states(name: str) -> None:
    """bf16 weights and fp32 gradients of a stage (6 bytes), and its share of the optimizer (12 bytes, split over the
    ranks of the stage). The fullest stage is stated, which has an embedding or an output projection beside its blocks.
    """
    text = (REPOSITORY / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    config, counts = CONFIGS[name], count_parameters(CONFIGS[name].model)
    layout, moe = config.parallel, config.model.moe
    gpus, stated = re.findall(r"^# For (\d+) GPUs: .*? (\d+) GB", text, flags=re.MULTILINE)[0]
    experts = counts.idle_experts * moe.num_experts // (moe.num_experts - moe.top_k) if moe is not None else 0
    assert layout.tensor == 1
    split = experts + counts.tables
    others = re.findall(r"With parallel\.memory: (\d+) it would be (\d+) GB", text)
    for group, gigabytes in [(layout.memory, stated), *others]:
        of_mean_stage = (counts.total - split + split / int(group)) / layout.pipeline
        num_bytes = 6 * of_mean_stage + 12 * counts.total / int(gpus)
        other = replace(config, parallel=replace(layout, memory=int(group)))
        by_stage = [stage.held for stage in stage_bytes(other, int(gpus))]
        assert fmean(by_stage) == pytest.approx(num_bytes, rel=1e-12)
        held = held_bytes(other, int(gpus)).total
        assert held == pytest.approx(max(by_stage), rel=1e-12)
        assert held == pytest.approx(float(gigabytes) * 1e9, abs=0.5e9), group
    assert len(others) == text.count("parallel.memory: ")


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs" / "ultramemv2").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_choice_in_comments_can_be_made(path: Path, tmp_path: Path) -> None:
    chosen = path.read_text().replace("# initialisation:", "initialisation:").replace("# key_balance", "key_balance")
    (tmp_path / "a.yaml").write_text(chosen.replace("base: ..", f"base: {path.parents[1]}"))
    memory = load_config(tmp_path / "a.yaml").model.memory
    assert isinstance(memory, UltraMemV2Config)
    assert (memory.initialisation, memory.key_balance_weight) == ("matched", 0.3)


def test_the_common_recipe_loads() -> None:
    validate(load_config(REPOSITORY / "configs" / "recipe.yaml"), 1)


@pytest.mark.parametrize("name", BUILT)
def test_the_closed_formulas_are_the_built_model(name: str, built: dict[str, BuiltModel]) -> None:
    check_costs(to_build(name), built[name])
    assert isnan(built[name].products) == (name not in PASSED)


@pytest.mark.parametrize("name", V2)
def test_the_papers_rules(name: str) -> None:
    """D_k = h/2 counting both sides, D_p:D_v = 1:3, at most 128 rows and columns, where the paper's tables do not say
    otherwise.
    """
    model, memory = CONFIGS[name].model, V2[name]
    assert memory.row_top_k <= 128
    if name.startswith("ablations/table4"):
        assert (memory.key_dim, memory.value_dim) == (int(name.removeprefix("ablations/table4_dk")), 144)
    else:
        given_keys = name == BASELINE or name in ABLATIONS
        assert memory.key_dim == (524 if given_keys else model.hidden_size // 4)
    ratios = {"ultramemv2/227m_1.2b": 1, "ultramemv2/1b_7b": 2, "ablations/table5_1to8": 8}
    ratio = 1 if name.startswith("ablations/table4") else ratios.get(name, 3)
    assert memory.value_dim == ratio * memory.pre_value_dim
    assert model.num_memory_layers == model.num_layers
    assert memory.num_heads == 1


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_what_its_table_says_and_keeps_computation_equal(name: str) -> None:
    baseline, ablation = CONFIGS[BASELINE], CONFIGS[name]
    measure = flops_measure(4096)
    solved = solve_ffn_width(ablation.model, measure, measure(baseline.model))
    assert ablation.model.ffn_hidden_size == solved.width
    assert abs(solved.residual) < 4e-3
    memory, other = baseline.model.memory, ablation.model.memory
    assert memory is not None
    assert other is not None
    allowed = {"sharing": other.sharing} if "table7" in name else {"key_dim": other.key_dim} if "table4" in name else {}
    dims = {"value_dim": other.value_dim, "pre_value_dim": other.pre_value_dim}
    assert sum(dims.values()) == memory.value_dim + memory.pre_value_dim
    changed: MemoryConfig = replace(memory, **allowed, **({} if "table7" in name else dims))
    model = replace(baseline.model, ffn_hidden_size=solved.width, memory=changed)
    assert ablation == replace(baseline, name=ablation.name, model=model)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("430m_5b", 430e6),
        ("500m_6.8b", 500e6),
        ("1.25b_12.5b", 1.25e9),
        ("2.5b_25b", 2.5e9),
        ("2.5b_60b_top768", 2.5e9),
        ("2.5b_120b_top256", 2.5e9),
    ],
)
def test_a_width_that_is_derived_gives_the_active_parameters_of_the_name(name: str, target: float) -> None:
    model = CONFIGS[f"ultramemv2/{name}"].model
    assert model.ffn_hidden_size == solve_ffn_width(model, core_measure, target).width
    counts = count_parameters(model)
    total = float(re.findall(r"_([\d.]+)b", name)[0]) * 1e9
    assert counts.core == pytest.approx(target, rel=0.005)
    assert counts.total - counts.embedding == pytest.approx(total, rel=0.04)


@pytest.mark.parametrize("name", PEERS)
def test_models_of_one_size_have_one_backbone(name: str) -> None:
    like, model = CONFIGS[PEERS[name]], CONFIGS[name]
    kept = {"ffn_hidden_size": like.model.ffn_hidden_size, "memory": like.model.memory, "moe": None}
    assert replace(model.model, **kept) == like.model
    assert model.train == like.train


@pytest.mark.parametrize("name", [name for name in PEERS if name in MEMORIES and name not in GIVEN])
def test_a_derived_memory_follows_the_stated_rules(name: str) -> None:
    """Equal computation, and of the multiples of 4 the number of keys that comes nearest to equal totals, within 1 %."""
    model, like, memory = CONFIGS[name].model, CONFIGS[PEERS[name]].model, MEMORIES[name]
    measure, total = flops_measure(4096), count_parameters(like).total

    def solved(num_keys: int) -> ModelConfig:
        changed = replace(model, memory=replace(memory, num_keys=num_keys))
        return replace(changed, ffn_hidden_size=solve_ffn_width(changed, measure, measure(like)).width)

    misses = {
        num_keys: abs(count_parameters(solved(num_keys)).total / total - 1)
        for num_keys in (memory.num_keys - 4, memory.num_keys, memory.num_keys + 4)
    }
    assert model == solved(memory.num_keys)
    assert min(misses, key=misses.__getitem__) == memory.num_keys
    assert misses[memory.num_keys] < 0.01
    assert measure(model) == pytest.approx(measure(like), rel=0.004)
    per_hidden = {"ultramem": (4, 2), "memory_plus": (2, 1)}[memory.kind]
    assert (memory.key_dim, memory.value_dim) == tuple(model.hidden_size // part for part in per_hidden)
    assert model.num_memory_layers == (12 if "60b" in name else 4)
    assert memory.num_heads == 2
    assert memory.row_top_k <= 128
    each = model.num_layers // model.num_memory_layers
    ends = [span.add for span in model.memory_spans]
    assert ends == list(range(each - 1, model.num_layers, each))


@pytest.mark.parametrize("name", [name for name in PEERS if name in MEMORIES])
def test_models_of_one_size_read_equally_many_values(name: str) -> None:
    """Section 4.1 says so, to the nearest number. Values differ in width: Memory+ reads more bytes."""
    per_value = {n: CONFIGS[n].model.num_memory_layers * MEMORIES[n].num_heads for n in (name, PEERS[name])}
    read, wanted = (per_value[n] * MEMORIES[n].top_k for n in (name, PEERS[name]))
    assert abs(read - wanted) <= per_value[name] / 2
    assert (read == wanted) == (not name.endswith("430m_5b"))
    # The Triton kernels select no more.
    assert MEMORIES[name].top_k <= 1024


@pytest.mark.parametrize("name", [name for name in NAMES if PAPER.get(CONFIGS[name].name, None)])
def test_the_memorys_share_is_that_of_table_4(name: str) -> None:
    stated = PAPER[CONFIGS[name].name].memory_share
    if name.startswith("ablations/table4") or name == BASELINE:
        assert 100 * memory_share(CONFIGS[name]) == pytest.approx(float(stated), abs=0.55)
    else:
        assert not stated


@pytest.mark.parametrize(
    ("name", "official", "changes", "absent"),
    [
        ("ultramemv2/227m_1.2b", "UltraMemV2-227M README mlp4992 share0.25 perrankq=False", {}, 0),
        ("ultramemv2/1b_7b", "UltraMemV2-1B/7B Table10 mlp13312 share0.5 perrankq=True untied", {"num_keys": 528}, 0),
        ("ultramem/227m_1.2b", "UltraMem-227M script mlp5504", {}, 0),
        # The gains of the keys, which the release has and does not use.
        ("memory_plus/227m_1.2b", "Memory+-227M script mlp6016", {}, 4 * 384),
    ],
)
def test_the_released_classes_have_as_many_parameters(
    name: str, official: str, changes: dict[str, int], absent: int, golden_dir: Path
) -> None:
    counts = json.loads((golden_dir / "param_counts.json").read_text())["official_counts"][official]
    model = CONFIGS[name].model
    assert model.memory is not None
    ours = count_parameters(replace(model, memory=replace(model.memory, **changes)))
    assert (ours.total + absent, ours.tables) == (counts["total"], counts["tables"])


def test_the_table_of_the_doc_is_what_its_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    doc = (REPOSITORY / "docs" / "parameters.md").read_text(encoding="utf-8")
    ((command, output),) = re.findall(
        r"```\n(megamem config table [^\n]*)\n```\n\n<!-- output -->\n(.*?)\n<!-- end -->", doc, re.DOTALL
    )
    pattern = shlex.split(command)[-1]
    paths = [str(path) for path in sorted(Path().glob(pattern))]
    assert cli.main(["config", "table", *paths]) == 0
    models, _ = capsys.readouterr().out.strip().split("\n\n")
    assert models == output.strip(), f"update docs/parameters.md: {command}"
    assert set(paths) == {f"configs/{name}.yaml" for name in NAMES if name.startswith("ultramemv2/")}


def test_a_vocabulary_left_to_the_tokenizer_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("name: a")
    assert cli.main(["config", "table", str(path)]) == 2
    assert "model.vocab_size of a is left to the tokenizer" in " ".join(capsys.readouterr().err.split())
