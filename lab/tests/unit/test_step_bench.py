"""`megamem bench step`: the pairs that it derives, its arithmetic and what it prints; its refusals."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench.device_activity import DeviceActivity, Work
from lab.bench.part_costs import Part, part_costs
from lab.bench.step import Contender, config_lines, known_peak, plan_lines, ratios, with_pairs
from lab.bench.step_profile import StepTimes, turns
from lab.bench.timeline import Range, RangeTimes
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token, training_flops_per_token
from pretrain.planning.seconds.hardware import load_hardware
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.timing import step_time
from tools.cli import build_parser

H100 = load_hardware("h100-80g")
CONFIGS = Path(__file__).parents[3] / "configs"


def config_of(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / name, overrides)


@pytest.mark.parametrize("size", ["227m_1.2b", "1b_7b"])
def test_pairs_cost_what_they_are_compared_with(size: str) -> None:
    config = config_of(f"ultramemv2/{size}.yaml", "parallel.memory=8")
    memory, dense, experts = with_pairs({"m": config}).values()
    assert memory == Contender(config)
    assert (dense.like, experts.like) == ("m", "m")
    for contender in (dense, experts):
        assert contender.config.model.memory is None
        assert contender.config.train == config.train
        validate(contender.config, 8)
    length = config.train.sequence_length
    flops = forward_flops_per_token(config.model, length)
    assert forward_flops_per_token(dense.config.model, length) == pytest.approx(flops, rel=0.004)
    assert f"model.ffn_hidden_size {dense.config.model.ffn_hidden_size} (" in dense.derived
    counts, of_experts = count_parameters(config.model), count_parameters(experts.config.model)
    assert of_experts.active == pytest.approx(counts.active, rel=0.002)
    # Ranks share them, so that their number is a multiple of 8: one of 61 to 68.
    assert of_experts.total == pytest.approx(counts.total, rel=4 / 61)
    assert experts.config.model.moe is not None
    assert experts.config.model.moe.num_experts % 8 == 0
    assert f"all parameters {of_experts.total / counts.total - 1:+.2%}" in experts.derived


def test_only_a_memory_beside_a_dense_feed_forward_has_a_pair() -> None:
    for name in ("quickstart_dense.yaml", "olmoe/227m_1.2b.yaml"):
        with pytest.raises(ConfigError, match="--pair compares models of a memory"):
            with_pairs({name: config_of(name)})


def test_a_pair_that_cannot_be_is_refused_by_name() -> None:
    config = config_of("quickstart.yaml", "model.hidden_size=16", "model.ffn_hidden_size=8", "model.memory.key_dim=2")
    with pytest.raises(ConfigError, match="small: no mixture of experts has"):
        with_pairs({"small": config})


def test_configurations_of_one_layout_take_turns_on_a_cpu_only() -> None:
    config = config_of("quickstart.yaml")
    other = replace(config, parallel=replace(config.parallel, memory=2))
    configs = {"a": config, "b": other, "c": config}
    assert turns(configs) == [{"a": config, "c": config}, {"b": other}]
    assert turns(configs, alone=True) == [{"a": config}, {"b": other}, {"c": config}]


def test_peaks_by_name() -> None:
    names = (
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA GeForce GT 1030",
    )
    assert [known_peak(name) for name in names] == [989, 989, 756, 312, None]


def times(step_s: float = 0.5) -> StepTimes:
    """Two marked steps of 0.6 s."""
    seconds = {
        Range("forward", ""): 0.4,
        Range("forward", Part.KEYS): 0.1,
        Range("backward", Part.KEYS): 0.2,
        Range("backward", Part.GATHER_SUM): 0.06,
        Range("optimizer", ""): 0.44,
    }
    entries = Counter({Range("forward", Part.KEYS): 8, Range("backward", Part.KEYS): 8})
    return StepTimes([2 * step_s, step_s, 0.9 * step_s], RangeTimes(seconds, entries, 2))


def test_a_block_says_where_the_time_went() -> None:
    config = config_of("quickstart.yaml", "model.vocab_size=4096")
    lines = list(config_lines("name", Contender(config, derived="from nothing"), times(), 4, 2.0))
    text = "\n".join(lines)
    assert lines[:2] == ["name", "  derived: from nothing"]
    tflops = 2048 * training_flops_per_token(config.model, 256) / 0.5 / 4 / 1e12
    assert f"step 500.00 ms (450.00 .. 1000.00), 4,096 tokens/s, {tflops:.3g} TFLOP/s per rank" in text
    assert f"MFU {tflops / 2:.1%} of 2" in text
    assert re.search(r"marked step +600\.00 ms +\(\+20\.0% on the step without marks\)", text)
    assert re.search(r"forward +250\.00 ms +41\.7%", text)
    assert re.search(r"backward +130\.00 ms +21\.7%", text)
    assert re.search(r"optimizer +220\.00 ms +36\.7%", text)
    assert "gradient reduction" not in text
    assert re.search(r"the memory in it +180\.00 ms +30\.0%", text)
    cost = part_costs(config, 4)[Part.KEYS].flops
    assert cost is not None
    assert re.search(
        rf"{Part.KEYS} +150\.00 ms +25\.0% +50\.00 +100\.00 +8  {cost / 1e9:.4g} GFLOP, {cost / 0.15 / 1e12:.3g} TFLOP/s$",
        text,
        re.MULTILINE,
    )
    moved = part_costs(config, 4)[Part.GATHER_SUM].num_bytes
    assert moved is not None
    assert f"{moved / 1e6:.4g} MB, {moved / 0.03 / 1e9:.3g} GB/s" in text


def test_a_plan_stands_beside_what_was_measured_part_by_part() -> None:
    """On figures as a GPU's marks would record them."""
    config = config_of(
        "ultramemv2/227m_1.2b.yaml", "parallel.memory=2", "train.global_batch_size=8", "train.micro_batch_size=4"
    )
    seconds = {
        Range("forward", ""): 0.2,
        Range("forward", Part.KEYS): 0.02,
        Range("backward", Part.PROJECTIONS): 0.03,
        Range("forward", Part.GATHER_SUM): 0.04,
        Range("backward", Part.TABLE_GRADIENT): 0.06,
        Range("forward", Part.EXCHANGE): 0.01,
    }
    lines = list(plan_lines(config, StepTimes([0.2], RangeTimes(seconds, Counter(), 2)), 2, H100))
    apart = replace(config, parallel=replace(config.parallel, overlap_memory=False))
    planned = step_time(apart, 2, H100).by_part
    assert planned[TimePart.MEMORY_EXCHANGE] > step_time(config, 2, H100).by_part[TimePart.MEMORY_EXCHANGE]
    rows = filter(None, (re.fullmatch(r" {4}(.{60}) +([\d.]+) +([\d.]+)", line) for line in lines))
    found = {row[1].strip(): (float(row[2]), float(row[3])) for row in rows}
    for part, measured_s in (
        (TimePart.MEMORY_MATMULS, 0.025),
        (TimePart.MEMORY_GATHERS, 0.02),
        (TimePart.MEMORY_GRADIENTS, 0.03),
        (TimePart.MEMORY_EXCHANGE, 0.005),
        (TimePart.MEMORY_IDS, 0.0),
    ):
        name = part.value.removeprefix("memory: ")
        assert found[name] == pytest.approx((1e3 * planned[part], 1e3 * measured_s), abs=0.006), name


def test_a_model_without_memory_has_phases_only() -> None:
    text = "\n".join(config_lines("name", Contender(config_of("quickstart_dense.yaml")), times(), 1, None))
    assert "the memory in it" not in text
    assert "derived" not in text
    assert "MFU unknown" in text


def test_ratios_to_the_first_and_to_the_pair() -> None:
    config = config_of("quickstart.yaml")
    contenders = {"m": Contender(config), "d": Contender(config, "derived", "m"), "other": Contender(config)}
    assert list(ratios(contenders, {"m": 0.3, "d": 0.2, "other": 0.6})) == [
        "step time over that of m",
        "   1.000x  m",
        "   0.667x  d",
        "   2.000x  other",
        "m takes 1.500 times as long as d",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "configs/quickstart.yaml", "--peak-tflops", "-3"], "--peak-tflops is -3: it must be above 0"),
        (["step", "seed=2"], "name at least one CONFIG"),
        (["step", "configs/quickstart.yaml", "--rounds", "0"], "use --rounds of at least 1"),
        (["step", "configs/quickstart.yaml", "--steps", "0"], "--steps is 0: nothing is measured with less than 1"),
    ],
)
def test_options_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    args = build_parser().parse_args(["bench", *words])
    with pytest.raises(ConfigError, match=re.escape(message)):
        args.func(args)


def test_busy_seconds_count_what_runs_side_by_side_once() -> None:
    work = [Work("b", 2.0, 3.0), Work("a", 0.0, 1.0), Work("a", 0.5, 1.5), Work("c", 0.6, 0.7)]
    activity = DeviceActivity.of(work)
    assert activity.busy_s == pytest.approx(2.5)
    assert activity.num_kernels == 4
    assert [(name, number) for name, _, number in activity.by_name] == [("a", 2), ("b", 1), ("c", 1)]
    first, *names = activity.lines(5.0)
    assert (
        first
        == "  the device is busy for 2500.00 ms, idle for 50% of the step: 4 kernels, 1250000.0 us of the step for each"
    )
    assert names[0].split() == ["2000.00", "ms", "80.0%", "2", "a"]


def test_names_beyond_the_first_are_one_line() -> None:
    activity = DeviceActivity.of(Work(f"k{n}", float(n), n + 0.5) for n in range(23))
    *_, last = activity.lines(23.0)
    assert last.split() == ["1500.00", "ms", "13.0%", "3", "3", "other", "names"]


def test_a_step_without_a_gpu_has_no_activity() -> None:
    contender = Contender(config_of("quickstart.yaml", "model.vocab_size=64"))
    marked = RangeTimes({Range("forward", ""): 1.0}, num_steps=1)
    text = "\n".join(config_lines("m", contender, StepTimes([0.5], marked), 1, None))
    assert "the device is busy" not in text
    with_one = StepTimes([0.5], marked, [DeviceActivity.of([Work("a", 0.0, 0.25)])])
    assert "the device is busy for 250.00 ms, idle for 50% of the step: 1 kernels" in "\n".join(
        config_lines("m", contender, with_one, 1, None)
    )
