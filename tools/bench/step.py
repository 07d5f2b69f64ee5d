"""`megamem bench step`: where the time of a step goes, beside a dense model and a mixture of experts of equal cost."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

from parallel.groups import ParallelGroups
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.costs.equal_compute import flops_measure, solve_experts, solve_ffn_width
from pretrain.costs.formulas import count_parameters, forward_flops_per_token, training_flops_per_token
from pretrain.costs.step import PARTS, Cost, part_costs
from pretrain.errors import ConfigError
from pretrain.session import relaid, session
from tools.bench.step_profile import BACKWARD, FORWARD, PHASES, StepTimes, measure_steps
from tools.bench.timeline import RangeTimes
from tools.parameter_table import padded_vocab_size

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
        derived: how it was made from another one; empty if somebody wrote it.
        like: the name of that other one.
    """

    config: RunConfig
    derived: str = ""
    like: str = ""


def with_pairs(configs: Mapping[str, RunConfig], vocab_size: int) -> dict[str, Contender]:
    """Each configuration, and after it the two that it is to be compared with.

    Args:
        configs: models with a memory and a dense feed-forward.
        vocab_size: token ids where `model.vocab_size` is not set.

    Raises:
        ConfigError: one of them has no pair.
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
            contenders[f"{name}, dense"] = replace(dense_pair(config, vocab_size), like=name)
            contenders[f"{name}, experts"] = replace(experts_pair(config, vocab_size), like=name)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    return contenders


def dense_pair(config: RunConfig, vocab_size: int) -> Contender:
    """The same without memory, with a feed-forward that makes up for its forward FLOPs per token.

    Raises:
        ValueError: no width can do it.
    """
    measure = flops_measure(padded_vocab_size(config.model, vocab_size), config.train.sequence_length)
    dense = replace(config.model, memory=None)
    # As wide tiles as GPUs like, where the rounding is below a percent.
    multiple = math.lcm(64 if config.model.hidden_size >= 512 else 8, config.parallel.tensor)
    solved = solve_ffn_width(dense, measure, measure(config.model), multiple=multiple)
    return Contender(
        replace(
            config,
            model=replace(dense, ffn_hidden_size=solved.width),
            # Nothing is left to split.
            parallel=replace(config.parallel, memory=1),
        ),
        f"model.ffn_hidden_size {solved.width} ({solved.exact:.1f} would be equal), forward FLOPs per token "
        f"{solved.residual:+.2%}",
    )


def experts_pair(config: RunConfig, vocab_size: int) -> Contender:
    """The same with experts in place of memory and feed-forward: as many active parameters, and about as many in all.

    Raises:
        ValueError: no mixture can do it.
    """
    rows = padded_vocab_size(config.model, vocab_size)
    counts = count_parameters(config.model, rows)
    bare = replace(config.model, memory=None)
    solved = solve_experts(bare, rows, active=counts.active, total=counts.total, count_multiple=config.parallel.memory)
    moe = solved.moe
    return Contender(
        replace(config, model=replace(bare, moe=moe)),
        f"{moe.top_k} of {moe.num_experts} experts of width {moe.expert_ffn_hidden_size}, active parameters "
        f"{solved.active_residual:+.2%}, all parameters {solved.total_residual:+.2%}",
    )


def bench_steps_rank(
    contenders: Mapping[str, Contender], vocab_size: int, rounds: int, steps: int, peak_tflops: float | None
) -> None:
    """What one rank does: one layout after the other, and on GPUs one configuration after the other."""
    first = next(iter(contenders.values())).config
    results: dict[str, StepTimes] = {}
    with session(first) as groups:
        layout = first.parallel
        if groups.is_main:
            print("\n".join(_header(contenders, groups, f"{rounds} rounds of {steps} steps")), flush=True)
        for names in turns(contenders, on_gpu=groups.device.type == "cuda"):
            configs = [contenders[name].config for name in names]
            if configs[0].parallel != layout:
                layout = configs[0].parallel
                groups = relaid(configs[0], groups)
            measured = measure_steps(configs, groups, vocab_size=vocab_size, rounds=rounds, steps_per_round=steps)
            results |= dict(zip(names, measured, strict=True))
            _release_memory()
            if groups.is_main:
                # At once: a later one may be too large for the device.
                for name in names:
                    peak = peak_tflops or _peak_of(contenders[name].config, groups)
                    lines = config_lines(name, contenders[name], results[name], groups.world_size, vocab_size, peak)
                    print("", *lines, sep="\n", flush=True)
        if groups.is_main:
            print("", *ratios(contenders, {name: median(of.step_s) for name, of in results.items()}), sep="\n")


def turns(contenders: Mapping[str, Contender], *, on_gpu: bool) -> list[list[str]]:
    """Names that take turns: on a CPU, whose load changes, those of one layout; on GPUs, with less memory, none."""
    if on_gpu:
        return [[name] for name in contenders]
    by_layout: dict[ParallelConfig, list[str]] = {}
    for name, contender in contenders.items():
        by_layout.setdefault(contender.config.parallel, []).append(name)
    return list(by_layout.values())


def _release_memory() -> None:
    """Give back the memory of models that nobody needs any more; modules and their hooks refer to each other."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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
    name: str, contender: Contender, result: StepTimes, num_ranks: int, vocab_size: int, peak_tflops: float | None
) -> Iterator[str]:
    """The lines of one configuration.

    Args:
        name: what to call it.
        contender: what was measured.
        result: its times.
        num_ranks: all ranks.
        vocab_size: token ids where `model.vocab_size` is not set.
        peak_tflops: of one device; None: not known.
    """
    config, step_s = contender.config, median(result.step_s)
    rows, train = padded_vocab_size(config.model, vocab_size), config.train
    counts = count_parameters(config.model, rows)
    forward = forward_flops_per_token(config.model, rows, train.sequence_length)
    tokens = train.global_batch_size * train.sequence_length
    tflops = tokens * training_flops_per_token(config.model, rows, train.sequence_length) / step_s / num_ranks / 1e12
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
    yield from _phase_lines(result.marked, step_s)
    if config.model.memory is not None:
        yield from _memory_lines(result.marked, part_costs(config, num_ranks))


def _phase_lines(marked: RangeTimes, step_s: float) -> Iterator[str]:
    total = marked.total_s / marked.num_steps
    yield f"  {'marked step':32} {total * 1e3:10.2f} ms         ({total / step_s - 1:+.1%} on the step without marks)"
    for phase in PHASES:
        seconds = sum(s for where, s in marked.seconds.items() if where.phase == phase) / marked.num_steps
        if seconds:
            yield f"    {phase:30} {seconds * 1e3:10.2f} ms {seconds / total:6.1%}"


def _memory_lines(marked: RangeTimes, costs: Mapping[str, Cost]) -> Iterator[str]:
    total = marked.total_s / marked.num_steps
    of_memory = sum(s for where, s in marked.seconds.items() if where.part) / marked.num_steps
    yield f"  {'the memory in it':32} {of_memory * 1e3:10.2f} ms {of_memory / total:6.1%}   forward   backward  entered"
    for part in PARTS:
        of_part = {where: s / marked.num_steps for where, s in marked.seconds.items() if where.part == part}
        entries = sum(number for where, number in marked.entries.items() if where.part == part)
        if not of_part:
            continue
        seconds = sum(of_part.values())
        phases = [sum(s for where, s in of_part.items() if where.phase == phase) * 1e3 for phase in (FORWARD, BACKWARD)]
        rate = _rate(costs[part], seconds) if part in costs else ""
        yield (
            f"    {part:30} {seconds * 1e3:10.2f} ms {seconds / total:6.1%} {phases[0]:9.2f}  {phases[1]:9.2f}  "
            f"{entries / marked.num_steps:7g}  {rate}"
        ).rstrip()


def _rate(cost: Cost, seconds: float) -> str:
    if cost.flops is not None:
        return f"{cost.flops / 1e9:.4g} GFLOP, {cost.flops / seconds / 1e12:.3g} TFLOP/s"
    assert cost.num_bytes is not None
    return f"{cost.num_bytes / 1e6:.4g} MB, {cost.num_bytes / seconds / 1e9:.3g} GB/s"


def ratios(contenders: Mapping[str, Contender], step_s: Mapping[str, float]) -> Iterator[str]:
    """How step times compare: with the first configuration's, and each memory's with those of its pair."""
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
