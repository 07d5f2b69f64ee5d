"""Plans: figures computed by hand, layouts that the rules allow, and what the command writes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megamem.parameters.trained_part import Trained
from pretrain.config.layout_rules import layout_problems
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.planning.bytes.activations import in_flight
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart
from pretrain.planning.counts.dense_twin import dense_twin
from pretrain.planning.counts.formulas import (
    count_parameters,
    forward_flops_per_token,
    memory_flops,
    training_flops_per_token,
)
from pretrain.planning.counts.pipeline_stages import Division
from pretrain.planning.dryrun.fewest_microbatches import with_fewest_microbatches
from pretrain.planning.seconds.checkpoints import checkpoint_costs
from pretrain.planning.seconds.hardware import FOLDER, Hardware, load_hardware
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.timing import step_time
from tests.rotation import in_rotation, in_turn
from tools import cli
from tools.plan.counted import reason_not_to_count, with_counts
from tools.plan.layouts import (
    Estimate,
    all_estimates,
    estimate,
    estimates_of,
    possible_layouts,
    recommended,
    too_large,
)

REPOSITORY = Path(__file__).parents[2]
LARGE = REPOSITORY / "configs" / "ultramemv2" / "2.5b_120b_top256.yaml"
SMALL = REPOSITORY / "configs" / "ultramemv2" / "2.5b_25b.yaml"
LATENTS = REPOSITORY / "configs" / "lave" / "d12_mla_x2.yaml"
H100 = load_hardware("h100-80g")


# Read off the design by hand: GB sent for lookups per step of 256 GPUs, of which to other nodes; GB of tables on a GPU.
@pytest.mark.parametrize(
    ("group", "sent", "far", "tables"), [(8, 16.6, 0, 27), (16, 33.0, 11.5, 16.5), (64, 130, 67, 8.2)]
)
def test_the_120b_model_on_256_gpus_is_what_was_computed_by_hand(
    group: int, sent: float, far: float, tables: float
) -> None:
    config = load_config(LARGE, [f"parallel.memory={group}"])
    time = step_time(config, 256, H100)
    assert sum(time.sent[0].exchange) / 1e9 == pytest.approx(sent, rel=0.02)
    # Of gathers a ring takes an eighth between nodes.
    assert time.sent[0].exchange[1] / 1e9 == pytest.approx(far, rel=0.02)
    held = stage_bytes(config, 256)[0].by_part
    of_tables = sum(num_bytes for part, num_bytes in held.items() if "table" in part.value)
    assert of_tables / 1e9 == pytest.approx(tables, rel=0.02)


def test_parts_add_up_to_the_step_and_the_model_flops_to_its_share_of_the_peak() -> None:
    time = step_time(load_config(LARGE), 256, H100)
    assert set(time.by_part) == set(TimePart)
    assert all(seconds >= 0 for seconds in time.by_part.values())
    assert time.tokens_per_s * time.total_s == pytest.approx(1024 * 4096)
    # 2 x (2.5B active core and the output projection) x 3 passes, and attention on top.
    lower = 6 * (2.5e9 + 50304 * 2560) * time.tokens_per_s / (256 * 989e12)
    assert lower < time.mfu < 1.3 * lower


@pytest.mark.parametrize(
    ("key", "layers"),
    [
        ("model.memory=null", None),
        ("model.memory=null", (2, 5)),
        # Latents are projected once more for values.
        ("model.memory.mixed_into=values", None),
    ],
)
def test_products_of_blocks_are_timed_as_they_are_counted(key: str, layers: tuple[int, ...] | None) -> None:
    config = load_config(LATENTS, [key, "train.recompute=none"])
    config = replace(config, optimizer=replace(config.optimizer, trained_layers=layers))
    model, length = config.model, config.train.sequence_length
    output = 2.0 * 65536 * model.hidden_size
    counted = training_flops_per_token(model, length, Trained(layers)) - 3 * memory_flops(model)
    counted -= (3 if layers is None else 2) * output
    parts = step_time(config, 1, H100).by_part
    timed = parts[TimePart.MATMULS] * H100.flops_per_s + parts[TimePart.ATTENTION] * H100.attention_flops_per_s
    assert timed == pytest.approx(config.train.tokens_per_step * counted, rel=1e-12)


def test_a_step_is_shorter_on_faster_hardware() -> None:
    config = load_config(LARGE, ["parallel.memory=16"])
    before = step_time(config, 256, H100).total_s
    for key in ("peak_bf16_tflops", "memory_bandwidth_gb_per_s", "network_gb_per_s"):
        assert step_time(config, 256, replace(H100, **{key: 2 * getattr(H100, key)})).total_s < before, key
    assert step_time(config, 256, replace(H100, launch_us=1000.0)).by_part[TimePart.LAUNCHES] > 0


def test_a_reduction_takes_what_a_ring_takes() -> None:
    # 8 replicas of 1 GB of gradients in fp32 that nothing hides, each on a node of its own.
    hardware = replace(H100, network_gb_per_s=50.0, network_fraction=1.0)
    config = load_config(LARGE, ["parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"])
    time = step_time(config, 256, hardware)
    elements = 117_052_538_880 / 4 / 8
    expected = elements * (4 + 2) * (7 / 8) / 50e9
    assert time.by_part[TimePart.MEMORY_REDUCTION] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("pipeline", "virtual", "flights"), [(4, 1, [4, 3, 2, 1]), (2, 2, [5, 3]), (4, 3, [15, 13, 11, 9])]
)
def test_passes_in_flight_are_those_of_the_schedules(pipeline: int, virtual: int, flights: list[int]) -> None:
    config = load_config(LARGE)
    layout = replace(config.parallel, pipeline=pipeline, virtual_pipeline=virtual)
    config = replace(config, parallel=layout)
    division = Division(1, 1, 1, num_microbatches=16, table_microbatches=16, rank_tokens=1, loss_tokens=1)
    assert [in_flight(config, rank, division) for rank in range(pipeline)] == flights


def test_rows_of_tables_are_cut_in_parts_where_they_can_be() -> None:
    config = load_config(LARGE, ["parallel.memory=8", "parallel.memory_rows=8"])
    found = {(layout.parallel.memory, layout.parallel.memory_rows) for layout in possible_layouts(config, 64, H100)}
    assert found == {(group, rows) for group in (1, 2, 4, 8, 16, 32, 64) for rows in (1, 2, 4, 8) if group % rows == 0}
    # Rows that are read as often as their tokens come are never cut.
    of_tokens = load_config(REPOSITORY / "configs" / "move" / "d12_x1.yaml")
    assert {layout.parallel.memory_rows for layout in possible_layouts(of_tokens, 64, H100)} == {1}


@pytest.mark.parametrize("rows", [False, True])
def test_gradients_of_rows_have_the_layouts_that_they_can_have(rows: bool) -> None:
    """Those of dense gradients, with replicas, and with a copy of a bank on every stage."""
    gradients = f"optimizer.table_gradients={'rows' if rows else 'dense'}"
    keys = ["optimizer.tables=row_wise", gradients, "optimizer.value_weight_decay=0"]
    config = load_config(REPOSITORY / "configs" / "tide" / "750m.yaml", [*keys, "parallel.pipeline=1"])
    found = {layout.parallel.pipeline for layout in possible_layouts(config, 8, H100)}
    assert found == {1, 2, 4, 8}
    replicas = {8 // layout.parallel.memory for layout in possible_layouts(config, 8, H100)}
    assert {1, 2, 4, 8} <= replicas


@in_turn(0)
def test_layouts_of_several_streams_mix_them_again_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = REPOSITORY / "configs" / "engram" / "v4_1_flash.yaml"
    config = load_config(path)
    found = estimates_of(config, 256, H100)
    assert {(each.config.train.recompute, each.config.train.recompute_streams) for each in found} == {
        *(("none", blocks) for blocks in (None, 2, 4)),
        ("full", None),
    }
    for each in found:
        assert ("train.recompute_streams" in each.overrides) == (each.config.train.recompute == "none")
    at_every_site, of_two_blocks = (
        next(e for e in found if e.config.train == replace(config.train, recompute="none", recompute_streams=blocks))
        for blocks in (None, 2)
    )
    assert of_two_blocks.predicted_bytes < at_every_site.predicted_bytes
    assert at_every_site.time.total_s < of_two_blocks.time.total_s < 1.03 * at_every_site.time.total_s
    target = tmp_path / "best.yaml"
    assert (
        cli.main(["plan", str(path), "--gpus", "256", "--gpu", "h100-80g", "--write", str(target), "--count", "0"]) == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"days  streams of\n", out)
    assert {"a site", "2 blocks", "4 blocks"} <= set(re.findall(r"(a site|[24] blocks)$", out, re.MULTILINE))
    assert load_config(target).train.recompute_streams in (2, 4)


def test_layouts_keep_to_the_rules_and_differ() -> None:
    layouts = list(possible_layouts(load_config(LARGE), 64, H100))
    assert len(set(layouts)) == len(layouts)
    # Four groups of six blocks, of which none may be split.
    assert {(c.parallel.pipeline, c.parallel.virtual_pipeline) for c in layouts} == {
        (1, 1),
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 1),
    }
    for config in layouts:
        assert not list(layout_problems(config, 64))
    for config in layouts[::12]:
        for found in estimates_of(config, 64, H100):
            validate(replace(found.config, train=replace(found.config.train, kernels="auto")), 64)


@in_turn(0)
def test_what_does_not_fit_on_eight_gpus_is_said_and_what_does_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(SMALL)
    assert not estimate(config, 8, H100).fits(H100)
    target, picture = tmp_path / "best.yaml", tmp_path / "best.svg"
    words = [
        "plan",
        str(SMALL),
        "--gpus",
        "8",
        "--gpu",
        "h100-80g",
        "--write",
        str(target),
        "--plot",
        str(picture),
        "--count",
        "0",
    ]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "As written it does not fit: a rank of stage" in out
    written = load_config(target)
    best = estimate(written, 8, H100)
    assert best.fits(H100)
    assert replace(written, parallel=config.parallel, train=config.train, optimizer=config.optimizer) == config
    assert f"{best.time.total_s:.2f}" in out
    saved = checkpoint_costs(written, 8, H100)
    assert f"A checkpoint of {saved.num_bytes / 1e9:,.1f} GB, at 2 GB/s per node (s):" in out
    assert f"until it is written {saved.save_s:.1f}" in " ".join(out.split())
    assert "What the memory costs most" in out
    assert re.search(r"A dense model of equal FLOPs \(ffn_hidden_size [\d,]+\): [\d.]+ s per step", out)
    assert "table gradients" in picture.read_text(encoding="utf-8")


def test_a_layout_of_a_dense_model_is_written_as_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no tables to split, and is counted on a machine without Triton."""
    dense, target = tmp_path / "dense.yaml", tmp_path / "best.yaml"
    dense.write_text("model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 512}")
    assert cli.main(["plan", str(dense), "--gpus", "4", "--gpu", "h100-80g", "--write", str(target)]) == 0
    assert re.search(
        r"^Memory of stage 0, the fullest of 1 .* planned +counted$", capsys.readouterr().out, re.MULTILINE
    )
    assert load_config(target).model == load_config(dense).model
    assert "memory" not in yaml.safe_load(target.read_text())["parallel"]


def test_the_page_names_the_fastest_layout_on_eight_gpus() -> None:
    page = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
    named = re.search(r"the fastest with TP (\d+), PP (\d+), DP (\d+), G (\d+)", page)
    assert named is not None
    hardware, config = load_hardware("h100-80g"), load_config(SMALL)
    fitting = [each for each in all_estimates(config, 8, hardware) if each.fits(hardware)]
    fastest = min(fitting, key=lambda each: each.time.total_s).config.parallel
    data = 8 // (fastest.tensor * fastest.pipeline * fastest.context)
    assert tuple(map(int, named.groups())) == (fastest.tensor, fastest.pipeline, data, fastest.memory)


def test_the_plan_as_json_has_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["plan", str(SMALL), "--gpus", "8", "--gpu", "h200-141g", "--top", "3", "--json", "--count", "0"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [each["recommended"] for each in found].count(True) == 1
    assert [each["step_s"] for each in found[:3]] == sorted(each["step_s"] for each in found[:3])
    assert all(each["fits"] and sum(each["time_s"].values()) == pytest.approx(each["step_s"]) for each in found)
    assert all(len(each["memory_costs"]) == 3 for each in found)
    # One node, at 2 GB/s.
    num_bytes = pytest.approx(12 * count_parameters(load_config(SMALL).model).total)
    assert all(each["checkpoint"]["num_bytes"] == num_bytes for each in found)
    assert all(each["checkpoint"]["save_s"] == each["checkpoint"]["num_bytes"] / 2e9 for each in found)


@pytest.fixture(scope="module")
def on_sixteen() -> list[Estimate]:
    """Layouts of the smaller model on 16 GPUs."""
    return all_estimates(load_config(SMALL), 16, H100)


def test_what_is_recommended_is_the_smallest_of_the_fast_ones(on_sixteen: list[Estimate]) -> None:
    found = on_sixteen
    best = recommended(found, H100)
    assert best is not None
    fitting = [each for each in found if each.fits(H100)]
    fast = [each for each in fitting if each.time.total_s <= 1.05 * fitting[0].time.total_s]
    assert len(fast) > 1
    assert best.peak_bytes == min(each.peak_bytes for each in fast)
    assert recommended(found, replace(H100, memory_gb=8.0)) is None


class Counts:
    """Dry runs that find these bytes, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *totals: float) -> None:
        self.asked: list[tuple[RunConfig, int, list[int]]] = []
        self._totals = iter(totals)
        monkeypatch.setattr("pretrain.planning.dryrun.rank.dry_run", self._dry_run)
        monkeypatch.setattr("tools.plan.counted.hide_gpus", lambda: None)

    def _dry_run(
        self, config: RunConfig, world_size: int, ranks: list[int], *, as_gpu: bool
    ) -> Iterator[SimpleNamespace]:
        assert as_gpu
        self.asked.append((config, world_size, ranks))
        yield SimpleNamespace(peak_of_step=SimpleNamespace(by_part={MemoryPart.TABLES: next(self._totals)}))


def test_a_layout_that_counts_larger_than_the_device_is_not_recommended(
    on_sixteen: list[Estimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is counted in its place, then the fastest that are not counted yet."""
    counts, found = Counts(monkeypatch, 1e12, 5e9, 6e9), on_sixteen
    first = recommended(found, H100)
    counted = with_counts(found, 3, 16, H100)
    best = recommended(counted, H100)
    assert first is not None
    assert best is not None
    assert [each.peak_bytes for each in counted if each.config is first.config] == [1e12]
    assert best.counted == {MemoryPart.TABLES: 5e9}
    third = next(e for e in found if e.fits(H100) and e.config not in (first.config, best.config))
    in_turn = (first.config, best.config, third.config)
    assert [config for config, *_ in counts.asked] == [with_fewest_microbatches(config, 16) for config in in_turn]
    for config, (_, world_size, ranks) in zip(in_turn, counts.asked, strict=True):
        held = [stage.total for stage in stage_bytes(config, 16)]
        assert (world_size, ranks) == (16, [held.index(max(held)) * 16 // config.parallel.pipeline])


def test_counting_goes_on_until_what_is_recommended_has_been_counted(
    on_sixteen: list[Estimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch, 1e12, 1e12, 7e9)
    counted = with_counts(on_sixteen, 1, 16, H100)
    best = recommended(counted, H100)
    assert best is not None
    assert (len(counts.asked), best.peak_bytes) == (3, 7e9)
    # And where nothing is left that might fit, it ends.
    none = with_counts([on_sixteen[-1]], 1, 16, replace(H100, memory_gb=8.0))
    assert (none, len(counts.asked)) == ([on_sixteen[-1]], 3)


def test_what_does_not_fit_as_counted_is_told_by_counted_parts(on_sixteen: list[Estimate]) -> None:
    found = replace(on_sixteen[0], counted={MemoryPart.LOSS: 90e9, MemoryPart.TABLES: 10e9})
    said = too_large(found, H100)
    assert "would hold 100.0 GB at its peak, as a dry run counts, of which logits and loss 90.0 GB" in said
    assert "train.loss_chunk_tokens" in said


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), None),
        (
            ("optimizer.tables=row_wise", "optimizer.table_gradients=rows"),
            r"a step of \d+ microbatches takes some \d+ minutes to count \(--count 1 does\)",
        ),
    ],
    ids=["dense gradients", "gradients of rows"],
)
def test_a_dry_run_of_minutes_is_not_made_unasked(overrides: tuple[str, ...], reason: str | None) -> None:
    found = [estimate(load_config(SMALL, ["train.micro_batch_size=1", *overrides]), 8, replace(H100, memory_gb=1e4))]
    said = reason_not_to_count(found, 8, replace(H100, memory_gb=1e4))
    assert (said is None) == (reason is None)
    assert reason is None or re.fullmatch(reason, said or "")


def test_a_machine_without_triton_plans_and_says_that_nothing_was_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.plan.counted.find_spec", lambda name: None)
    assert cli.main(["plan", str(SMALL), "--gpus", "8", "--gpu", "h200-141g", "--as-written"]) == 0
    out, err = capsys.readouterr()
    assert "Not counted by a dry run: triton is not installed" in err
    assert "counted" not in out


def test_host_memory_limits_what_is_stepped_and_saved_there() -> None:
    config = load_config(LARGE, ["optimizer.value_offload=cpu", "checkpoint.asynchronous=true"])
    found = estimate(config, 256, H100)
    # 12 bytes of each of the tables' parameters, and again of all of them for the copy that is written.
    tables, copied = 12 * 117_052_538_880 / 256, 12 * count_parameters(config.model).total / 256
    assert found.host_bytes == pytest.approx(tables + copied, rel=0.01)
    assert found.fits(H100)
    small = replace(H100, host_memory_gb=64.0)
    assert not found.fits(small)
    assert "GB of host memory while it saves" in too_large(found, small)


def test_a_dense_twin_has_as_many_operations_and_no_memory() -> None:
    config = load_config(LARGE)
    found = dense_twin(config)
    assert found is not None
    twin = found.config
    assert twin.model.memory is None
    length = config.train.sequence_length
    flops = forward_flops_per_token(config.model, length)
    assert forward_flops_per_token(twin.model, length) == pytest.approx(flops, rel=0.005)
    dense, own = step_time(twin, 256, H100), step_time(config, 256, H100)
    assert not dense.memory_costs
    assert dense.total_s < own.total_s
    assert dense_twin(twin) is None


def test_a_checkpoint_is_what_was_computed_by_hand() -> None:
    config = load_config(LARGE)
    costs = checkpoint_costs(config, 64, H100)
    assert costs.num_bytes == pytest.approx(12 * count_parameters(config.model).total)
    # 8 nodes, 2 GB/s each; hashed and loaded.
    assert costs.save_s == pytest.approx(costs.num_bytes / 16e9)
    assert costs.stall_s == costs.save_s
    assert costs.restart_s == pytest.approx(H100.start_s + 2 * costs.save_s)
    copied = checkpoint_costs(load_config(LARGE, ["checkpoint.asynchronous=true"]), 64, H100)
    assert copied.stall_s == pytest.approx(costs.num_bytes / 64 / 50e9)


def test_a_mixture_is_planned_with_what_its_tokens_send() -> None:
    config = load_config(REPOSITORY / "configs" / "olmoe" / "2.5b_25b.yaml", ["parallel.memory=16"])
    near, far = step_time(config, 128, H100), step_time(config, 128, replace(H100, network_gb_per_s=5.0))
    assert near.by_part[TimePart.EXPERTS] > 0
    assert far.by_part[TimePart.EXPERTS] == pytest.approx(10 * near.by_part[TimePart.EXPERTS])
    alone = load_config(REPOSITORY / "configs" / "olmoe" / "2.5b_25b.yaml", ["parallel.memory=1"])
    assert step_time(alone, 128, H100).by_part[TimePart.EXPERTS] == 0


@in_turn(1)
def test_a_gpu_that_is_too_small_is_told_with_the_part_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(f"base: {FOLDER / 'h100-80g.yaml'}\nmemory_gb: 8.0\n", encoding="utf-8")
    assert cli.main(["plan", str(LARGE), "--gpus", "8", "--gpu", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no layout fits" in said
    assert re.search(r"of which (optimizer state of tables|table gradients|tables) [\d.,]+ GB", said)
    assert cli.main(["plan", str(LARGE), "--gpus", "8", "--gpu", "h900"]) == 2
    assert "b200-192g, h100-80g, h200-141g" in " ".join(capsys.readouterr().err.split())


def test_a_digit_too_many_is_refused_before_its_divisors_are_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(LARGE), "--gpus", "10000000000", "--gpu", "h100-80g"]) == 2
    assert "--gpus is 10000000000: layouts are searched for 1048576 GPUs at most" in capsys.readouterr().err


def test_cheaper_state_of_tables_is_proposed_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(REPOSITORY / "configs" / "ultramemv2" / "1.25b_12.5b.yaml")
    keys = ["optimizer.tables=row_wise", "optimizer.table_gradient_dtype=bf16"]
    assert cli.main(["plan", model, "--gpus", "1", "--gpu", "h100-80g"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    found = re.search(rf"It fits with {' '.join(keys)}, which takes ([\d.]+) GB", said)
    assert found is not None
    assert cli.main(["plan", model, *keys, "--gpus", "1", "--gpu", "h100-80g", "--json", "--count", "0"]) == 0
    (best,) = [each for each in json.loads(capsys.readouterr().out) if each["recommended"]]
    assert f"{max(stage['total_bytes'] for stage in best['stages']) / 1e9:.1f}" == found[1]


FEW_GPUS = sorted((REPOSITORY / "configs" / "few_gpus").glob("*.yaml"))


@pytest.mark.parametrize("path", in_rotation(FEW_GPUS), ids=lambda path: path.stem)
def test_a_file_for_few_gpus_is_what_its_command_writes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    said = path.read_text(encoding="utf-8").partition("\n")[0]
    num_gpus = int(path.stem.rpartition("_")[2])
    program, *words, target = shlex.split(said.partition(": ")[2])
    assert (program, target) == ("megamem", str(path.relative_to(REPOSITORY)))
    assert words[words.index("--gpus") + 1] == str(num_gpus)
    assert cli.main([*words, str(tmp_path / path.name), "--count", "0"]) == 0
    config = load_config(path)
    assert load_config(tmp_path / path.name) == config
    assert estimate(config, num_gpus, load_hardware("h100-80g")).peak_bytes < 76e9
    # And nothing that AdamW updates would fit there.
    assert cli.main(["plan", words[1], "--gpus", str(num_gpus), "--gpu", "h100-80g"]) == 2
    assert "no layout fits" in capsys.readouterr().err


def test_a_stage_must_be_named_unless_all_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    staged = str(REPOSITORY / "configs" / "stages" / "2.5b_25b.yaml")
    assert cli.main(["plan", staged, "--gpus", "8", "--gpu", "h100-80g"]) == 2
    assert "has several stages: name one with --stage: " in capsys.readouterr().err
    words = ["plan", staged, "--gpus", "8", "--gpu", "h100-80g", "--stage", "decay", "--write", "x.yaml"]
    assert cli.main(words) == 2
    assert "--write gives every stage its layout: leave --stage out" in capsys.readouterr().err
    words = ["plan", str(SMALL), "data.datasets.0.path=x", "--gpus", "8", "--gpu", "h100-80g", "--write", "x.yaml"]
    assert cli.main(words) == 2
    assert "data.datasets.0.path=x sets an element of a list" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_figure_has_a_source(path: Path) -> None:
    assert isinstance(load_hardware(str(path)), Hardware)
    lines = path.read_text(encoding="utf-8").splitlines()
    for before, line in pairwise(lines):
        if line and not line.startswith(("#", "gpus_per_node")):
            assert re.match(r"# .*([Dd]ata sheet|[Aa]ssumed|[Mm]easured|announcement)", before), line
