"""`megamem bench step`: where the time of a step goes, beside a dense model and a mixture of experts of equal cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

from lab.bench.part_costs import Cost, Part, part_costs
from lab.bench.step_profile import StepPhase, StepTimes, measure_turns, turns
from lab.bench.timeline import RangeTimes
from lab.experts_twin import experts_twin
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.session import session
from pretrain.errors import ConfigError
from pretrain.planning.counts.dense_twin import dense_twin
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token, training_flops_per_token
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.timing import StepTime, step_time

_PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("A100", 312.0),
    ("B200", 2250.0),
)
"""bf16 TFLOP/s without sparsity, from NVIDIA's data sheets; the first whose name is part of the device's counts."""


@dataclass(frozen=True)
class Contender:
    """A configuration that is measured.

    Attributes:
        config: the run.
        derived: words on how it was made from another one; empty if somebody wrote it.
        like: the name of that other one.
    """

    config: RunConfig
    derived: str = ""
    like: str = ""


def with_pairs(configs: Mapping[str, RunConfig]) -> dict[str, Contender]:
    """Each configuration, and after it the two that it is to be compared with.

    Raises:
        ConfigError: a configuration has no memory or no dense feed-forward, or no pair.
    """
    contenders: dict[str, Contender] = {}
    for name, config in configs.items():
        if config.model.memory is None or config.model.moe is not None:
            raise ConfigError(
                f"--pair compares models of a memory and a dense feed-forward with others, and {name} is none: leave "
                "out --pair, or the file"
            )
        contenders[name] = Contender(config)
        try:
            for kind, pair in _pairs(config):
                contenders[f"{name}, {kind}"] = replace(pair, like=name)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    return contenders


def _pairs(config: RunConfig) -> Iterator[tuple[str, Contender]]:
    dense, experts = dense_twin(config), experts_twin(config)
    assert dense is not None
    assert experts is not None
    width = dense.solved
    yield (
        "dense",
        Contender(
            dense.config,
            f"model.ffn_hidden_size {width.width} ({width.exact:.1f} would be equal), forward FLOPs per token "
            f"{width.residual:+.2%}",
        ),
    )
    mixture, moe = experts.solved, experts.solved.moe
    yield (
        "experts",
        Contender(
            experts.config,
            f"{moe.top_k} of {moe.num_experts} experts of width {moe.expert_ffn_hidden_size}, active parameters "
            f"{mixture.active_residual:+.2%}, all parameters {mixture.total_residual:+.2%}",
        ),
    )


def bench_steps_rank(
    contenders: Mapping[str, Contender], rounds: int, steps: int, peak_tflops: float | None, hardware: Hardware | None
) -> None:
    """Measure on one rank: one layout after the other, and on GPUs one configuration after the other."""
    configs = {name: contender.config for name, contender in contenders.items()}
    step_s: dict[str, float] = {}
    with session(*configs.values()) as groups:
        if groups.is_main:
            print("\n".join(_header(contenders, groups, f"{rounds} rounds of {steps} steps")), flush=True)
        # The load of a CPU changes; GPUs have less memory.
        sets = turns(configs, alone=groups.device.type == "cuda")
        for measured in measure_turns(sets, groups, rounds=rounds, steps=steps):
            # At once: a later one may be too large for the device.
            for name, times in measured.items():
                step_s[name] = median(times.step_s)
                if groups.is_main:
                    peak = peak_tflops or _peak_of(configs[name], groups)
                    lines = [*config_lines(name, contenders[name], times, groups.world_size, peak)]
                    if hardware is not None:
                        lines += plan_lines(configs[name], times, groups.world_size, hardware)
                    print("", *lines, sep="\n", flush=True)
        if groups.is_main:
            print("", *ratios(contenders, step_s), sep="\n")


def _header(contenders: Mapping[str, Contender], groups: ParallelGroups, amount: str) -> Iterator[str]:
    on_gpu = groups.device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads per rank"
    layouts = [contender.config.parallel for contender in contenders.values()]
    pipelined = any(layout.pipeline > 1 for layout in layouts)
    turn = "one after the other" if on_gpu else "in turns"
    yield (
        f"{groups.world_size} rank{'s' * (groups.world_size > 1)}, {where}, torch {torch.__version__}; {amount} "
        f"without marks and as many with them, {turn}"
    )
    yield (
        "step: median (lowest .. highest) of the rounds without marks; parts: mean of the marked steps on rank "
        f"0{', of its pipeline stage' * pipelined}"
    )
    if on_gpu and any(layout.memory > 1 and layout.overlap_memory for layout in layouts):
        yield "memories that run beside the feed-forward (parallel.overlap_memory) run after it in marked steps"


def _peak_of(config: RunConfig, groups: ParallelGroups) -> float | None:
    known = groups.device.type == "cuda" and config.train.precision == "bf16"
    return known_peak(torch.cuda.get_device_name()) if known else None


def config_lines(
    name: str, contender: Contender, result: StepTimes, num_ranks: int, peak_tflops: float | None
) -> Iterator[str]:
    """Lines on one configuration; `peak_tflops` is that of one device, None if it is not known."""
    config, step_s = contender.config, median(result.step_s)
    model, tokens = config.model, config.train.tokens_per_step
    counts = count_parameters(model)
    forward = forward_flops_per_token(model, config.train.sequence_length)
    tflops = (
        tokens
        * training_flops_per_token(model, config.train.sequence_length, config.optimizer.trained)
        / step_s
        / num_ranks
        / 1e12
    )
    mfu = f"MFU {tflops / peak_tflops:.1%} of {peak_tflops:g}" if peak_tflops else "MFU unknown (no --peak-tflops)"
    yield name
    if contender.derived:
        yield f"  derived: {contender.derived}"
    yield (
        f"  {counts.total / 1e6:.2f}M parameters, {counts.active / 1e6:.2f}M active, {forward / 1e6:.2f} forward "
        "MFLOPs per token"
    )
    yield (
        f"  step {step_s * 1e3:.2f} ms ({min(result.step_s) * 1e3:.2f} .. {max(result.step_s) * 1e3:.2f}), "
        f"{tokens / step_s:,.0f} tokens/s, {tflops:.3g} TFLOP/s per rank, {mfu}"
    )
    for activity in result.activity:
        yield from activity.lines(step_s)
    yield from _phase_lines(result.marked, step_s)
    if model.memory is not None:
        yield from _memory_lines(result.marked, part_costs(config, num_ranks))


def plan_lines(config: RunConfig, measured: StepTimes, num_ranks: int, hardware: Hardware) -> Iterator[str]:
    """Predictions of `megamem plan` on hardware, and how many times as long it took: the step, the memory, the rest.

    The memory's time is known for marked steps; its share of them is taken for that of steps without marks.
    """
    planned, step_s = step_time(config, num_ranks, hardware), median(measured.step_s)
    lines = [("predicted by megamem plan", planned.total_s, step_s)]
    if config.model.memory is not None:
        memory_s = step_s * (1 - measured.marked.mean_s(part="") / measured.marked.mean_s())
        lines.append(("  the memory in it", planned.memory_s, memory_s))
        lines.append(("  all else", planned.total_s - planned.memory_s, step_s - memory_s))
    for what, predicted_s, taken_s in lines:
        yield f"  {what:32} {predicted_s * 1e3:10.2f} ms         (took {taken_s / predicted_s:.2f} times as long)"
    if config.model.memory is not None:
        # Marks lie on one stream: in marked steps nothing runs beside a memory.
        apart = replace(config, parallel=replace(config.parallel, overlap_memory=False))
        yield from _part_lines(step_time(apart, num_ranks, hardware), measured.marked)


_MEASURED_AS = {
    TimePart.MEMORY_MATMULS: (Part.KEYS, Part.PROJECTIONS),
    TimePart.MEMORY_SELECTION: (Part.SELECTION, Part.SCORES, Part.SINGULAR_VECTORS),
    TimePart.MEMORY_GATHERS: (Part.GATHER_DOT, Part.GATHER_SUM),
    TimePart.MEMORY_IDS: (Part.ROWS, Part.WEIGHTING),
    TimePart.MEMORY_GRADIENTS: (Part.TABLE_GRADIENT,),
    TimePart.MEMORY_EXCHANGE: (Part.EXCHANGE,),
    TimePart.MEMORY_REDUCTION: (Part.TABLE_REDUCTION,),
    TimePart.MEMORY_UPDATE: (Part.ZEROING, Part.TABLE_STEP),
}
"""Parts of a plan by the parts that marks tell apart. The sort is measured with the table gradients that ask for it."""


def _part_lines(planned: StepTime, marked: RangeTimes) -> Iterator[str]:
    """The memory's parts of a marked step, predicted and measured."""
    yield f"  {'part of the memory':62} {'predicted':>10} {'measured':>10} ms"
    for part, ranges in _MEASURED_AS.items():
        seconds = sum(marked.mean_s(part=each) for each in ranges)
        if seconds or planned.by_part[part]:
            yield f"    {part.value.removeprefix('memory: '):60} {planned.by_part[part] * 1e3:10.2f} {seconds * 1e3:10.2f}"


def _phase_lines(marked: RangeTimes, step_s: float) -> Iterator[str]:
    total = marked.mean_s()
    yield f"  {'marked step':32} {total * 1e3:10.2f} ms         ({total / step_s - 1:+.1%} on the step without marks)"
    for phase in StepPhase:
        if seconds := marked.mean_s(phase=phase):
            yield f"    {phase:30} {seconds * 1e3:10.2f} ms {seconds / total:6.1%}"


def _memory_lines(marked: RangeTimes, costs: Mapping[Part, Cost]) -> Iterator[str]:
    total = marked.mean_s()
    of_memory = total - marked.mean_s(part="")
    yield f"  {'the memory in it':32} {of_memory * 1e3:10.2f} ms {of_memory / total:6.1%}   forward   backward  entered"
    for part in Part:
        if seconds := marked.mean_s(part=part):
            forward, backward = (marked.mean_s(phase, part) for phase in (StepPhase.FORWARD, StepPhase.BACKWARD))
            entries = sum(number for where, number in marked.entries.items() if where.part == part)
            rate = _rate(costs[part], seconds) if part in costs else ""
            yield (
                f"    {part:30} {seconds * 1e3:10.2f} ms {seconds / total:6.1%} {forward * 1e3:9.2f}  "
                f"{backward * 1e3:9.2f}  {entries / marked.num_steps:7g}  {rate}"
            ).rstrip()


def _rate(cost: Cost, seconds: float) -> str:
    if cost.flops is not None:
        return f"{cost.flops / 1e9:.4g} GFLOP, {cost.flops / seconds / 1e12:.3g} TFLOP/s"
    assert cost.num_bytes is not None
    return f"{cost.num_bytes / 1e6:.4g} MB, {cost.num_bytes / seconds / 1e9:.3g} GB/s"


def ratios(contenders: Mapping[str, Contender], step_s: Mapping[str, float]) -> Iterator[str]:
    """Ratios of step times: to the first configuration's, and each memory's to those of its pair."""
    first = next(iter(contenders))
    yield f"step time over that of {first}"
    for name in contenders:
        yield f"  {step_s[name] / step_s[first]:6.3f}x  {name}"
    for name, contender in contenders.items():
        if contender.like:
            yield f"{contender.like} takes {step_s[contender.like] / step_s[name]:.3f} times as long as {name}"


def known_peak(device_name: str) -> float | None:
    """bf16 TFLOP/s of a device by its name; None: not in the table."""
    return next((peak for part, peak in _PEAKS if part in device_name), None)
