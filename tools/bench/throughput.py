"""`megamem bench`: training speed of several configurations, measured side by side on the same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.costs.formulas import count_parameters
from pretrain.costs.traffic import attention_bytes, exchanged_bytes
from pretrain.session import relaid, session
from tools.bench.step_profile import measure_steps
from tools.parameter_table import padded_vocab_size


def bench_rank(configs: Mapping[str, RunConfig], vocab_size: int, rounds: int, steps: int) -> None:
    """What one rank does: one layout after the other."""
    by_layout: dict[ParallelConfig, dict[str, RunConfig]] = {}
    for name, config in configs.items():
        by_layout.setdefault(config.parallel, {})[name] = config
    step_s: dict[str, tuple[float, ...]] = {}
    first = next(iter(configs.values()))
    with session(first) as groups:
        for layout, of_layout in by_layout.items():
            if layout != first.parallel:
                groups = relaid(next(iter(of_layout.values())), groups)
            measured = measure_steps(
                list(of_layout.values()),
                groups,
                vocab_size=vocab_size,
                rounds=rounds,
                steps_per_round=steps,
                with_marks=False,
            )
            step_s |= {name: times.step_s for name, times in zip(of_layout, measured, strict=True)}
        if groups.is_main:
            print(
                f"{groups.world_size} ranks, {rounds} rounds of {steps} steps each; tokens/s as median (lowest .. "
                "highest)"
            )
            _print(configs, step_s, groups.world_size, vocab_size)


def _print(
    configs: Mapping[str, RunConfig], step_s: Mapping[str, Sequence[float]], num_ranks: int, vocab_size: int
) -> None:
    reference = None
    for name, config in configs.items():
        tokens = config.train.global_batch_size * config.train.sequence_length
        speeds = [tokens / seconds for seconds in step_s[name]]
        reference = reference or median(speeds)
        counts = count_parameters(config.model, padded_vocab_size(config.model, vocab_size))
        sent = exchanged_bytes(config, num_ranks) + attention_bytes(config, num_ranks)
        print(
            f"  {name:36} {median(speeds):12,.0f} ({min(speeds):,.0f} .. {max(speeds):,.0f})  "
            f"{median(speeds) / reference:5.2f}x  {tokens / median(speeds):.3f} s/step  {sent / 1e6:.2f} MB sent  "
            f"{counts.total / 1e6:.2f}M parameters, {counts.active / 1e6:.2f}M active"
        )
