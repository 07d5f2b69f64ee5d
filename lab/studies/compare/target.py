"""Tokens and seconds to a target loss, as records of training speed are made (`megamem study compare --target-loss`).

A model is held against the first one, seed by seed: the two runs of a pair start from the same seed, and ran one after the
other, so that what a machine's load does to one it does to the other. The test is exact and assumes nothing of the
differences but that, were the models alike, each would be as likely with the other sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import fsum
from statistics import fmean

from lab.studies.compare.runs import RunResult
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from tools.common.metrics import Point
from tools.parameter_table import markdown_table

LEVEL = 0.01
"""A model is faster where chance would show such a lead less often than this."""
MOST_SEEDS = 20
"""The test goes through 2^n signs."""


@dataclass(frozen=True)
class Reached:
    """The place in a run where its validation loss reaches the target.

    Attributes:
        tokens: tokens seen by then, by linear interpolation between the evaluations before and after; those of the
            first one if it is there already.
        seconds: time of the steps so far, without evaluations and saves; None where the run's metrics lack one's.
    """

    tokens: float
    seconds: float | None


def check_target(configs: Sequence[RunConfig], seeds: Sequence[int]) -> None:
    """Refuse a comparison that cannot say when a loss was reached.

    Raises:
        ConfigError: a model is evaluated at its end alone, or there are too many seeds.
    """
    for config in configs:
        every = config.evaluation.every_steps
        if not 0 < every < config.train.num_steps:
            raise ConfigError(
                f"evaluation.every_steps is {every} for {config.name}, which is then evaluated at its end alone: "
                "--target-loss needs evaluations on the way, so set it to a small part of train.num_steps"
            )
    if len(seeds) > MOST_SEEDS:
        raise ConfigError(f"--seeds names {len(seeds)} seeds, and --target-loss tests at most {MOST_SEEDS}: name fewer")


def reached(result: RunResult, target: float, config: RunConfig) -> Reached | None:
    """The place where a run reaches the target for the first time; None if it does not."""
    tokens = crossing(result.curves.validation, target)
    if tokens is None:
        return None
    if len(result.step_s) != config.train.num_steps:
        return Reached(tokens, None)
    ends = [0.0, *accumulate(result.step_s)]
    step = tokens / config.train.tokens_per_step
    whole = min(int(step), len(result.step_s) - 1)
    return Reached(tokens, ends[whole] + (step - whole) * result.step_s[whole])


def crossing(points: Sequence[Point], target: float) -> float | None:
    """Tokens at which a curve of (tokens, loss) falls to the target for the first time; None if it does not."""
    if points and points[0][1] <= target:
        return points[0][0]
    for (before, above), (after, below) in pairwise(points):
        if below <= target:
            return before + (after - before) * (above - target) / (above - below)
    return None


def sign_flip_p(differences: Sequence[float]) -> float:
    """One-sided p value of paired differences: the share of the 2^n choices of their signs whose sum is as large.

    At least 2^-n, which is what n differences above zero give.
    """
    observed = fsum(differences)
    # What is equal but for rounding counts.
    slack = 1e-12 * fsum(map(abs, differences))
    signs = product((1, -1), repeat=len(differences))
    sums = (fsum(sign * d for sign, d in zip(of, differences, strict=True)) for of in signs)
    return sum(each >= observed - slack for each in sums) / 2 ** len(differences)


def seeds_needed(level: float = LEVEL) -> int:
    """The fewest seeds with which a p value can be below the level."""
    return next(n for n in range(1, 64) if 2.0**-n < level)


def lead(own: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Share of the reference's amount that a model needs less, in the mean over pairs, and its p value."""
    differences = [theirs - mine for mine, theirs in zip(own, reference, strict=True)]
    return fmean(differences) / fmean(reference), sign_flip_p(differences)


def verdict(
    name: str, own: Sequence[Reached | None], reference_name: str, reference: Sequence[Reached | None], end: Reached
) -> str:
    """A sentence on whether a model reaches the target sooner.

    Args:
        own: places in the model's runs, by seed.
        reference: places in the reference's runs with the same seeds.
        end: end of a whole run of the reference, which one that does not reach the target is taken to need; its seconds
            may be missing.
    """
    if None in own:
        return f"{name} does not reach it with {own.count(None)} of {len(own)} seeds, and is not judged."
    mine = [each for each in own if each is not None]
    theirs = [end if each is None else each for each in reference]
    parts, ps = [], []
    amounts: dict[str, Callable[[Reached], float | None]] = {
        "tokens": lambda r: r.tokens,
        "seconds": lambda r: r.seconds,
    }
    for what, amount in amounts.items():
        both = [[amount(each) for each in of] for of in (mine, theirs)]
        first, second = ([each for each in of if each is not None] for of in both)
        if len(first) == len(second) == len(own):
            share, p = lead(first, second)
            parts.append(f"{abs(share):.1%} {'fewer' if share > 0 else 'more'} {what} (p = {p:.2g})")
            ps.append(p)
    judged = "faster" if max(ps) < LEVEL else "not shown to be faster"
    if 0 < min(ps) < LEVEL <= max(ps):
        judged += " in both"
    missing = reference.count(None)
    floor = (
        f"; {reference_name} does not reach it with {missing} of {len(own)} seeds, and counts as if at its end"
        if missing
        else ""
    )
    few = (
        f"; {len(own)} seeds cannot give less than p = {2.0 ** -len(own):.2g}, and {seeds_needed()} can go below {LEVEL}"
        if 2.0 ** -len(own) >= LEVEL
        else ""
    )
    return f"{name} needs {' and '.join(parts)} than {reference_name}: {judged} at p < {LEVEL}{floor}{few}."


def target_section(target: float, configs: Sequence[RunConfig], results: Mapping[str, Sequence[RunResult]]) -> str:
    """The part of a report on the target: tokens and seconds by model, and a verdict for each but the first."""
    found = {config.name: [reached(run, target, config) for run in results.get(config.name, ())] for config in configs}
    rows = [(config.name, *_cells(found[config.name], len(results.get(config.name, ())))) for config in configs]
    first, *others = configs
    num_done = min(len(of) for of in found.values())
    lines = []
    for config in others if num_done else ():
        pairs = (found[config.name][:num_done], found[first.name][:num_done])
        whole = [fsum(run.step_s) for run in results[first.name] if len(run.step_s) == first.train.num_steps]
        end = Reached(first.train.num_steps * first.train.tokens_per_step, fmean(whole) if whole else None)
        lines.append("- " + verdict(config.name, pairs[0], first.name, pairs[1], end))
    head = ("model", "seeds that reach it", "million tokens", "seconds of steps")
    return f"""
Tokens and seconds to a validation loss of {target:g}: means over seeds, with the lowest and the highest, by linear
interpolation between evaluations.

{markdown_table(head, rows)}

{chr(10).join(lines) or "No seed of all models is done yet."}

p values are of an exact one-sided test of paired seeds, whose models ran one after the other: the share of all choices
of the differences' signs that leave a mean as large.
"""


def _cells(found: Sequence[Reached | None], num_runs: int) -> tuple[str, str, str]:
    there = [each for each in found if each is not None]
    seconds = [each.seconds for each in there if each.seconds is not None]
    return (
        f"{len(there)} of {num_runs}",
        _range([each.tokens / 1e6 for each in there], "{:.3f}"),
        _range(seconds, "{:.1f}") if len(seconds) == len(there) else "-",
    )


def _range(values: Sequence[float], pattern: str) -> str:
    if not values:
        return "-"
    spread = f" ({pattern.format(min(values))} to {pattern.format(max(values))})" if len(values) > 1 else ""
    return pattern.format(fmean(values)) + spread
