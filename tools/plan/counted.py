"""Layouts of a plan, some of them with the bytes that dry runs count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from parallel.machine.devices import hide_gpus
from pretrain.planning.counts.pipeline_stages import Division, stages_of
from pretrain.planning.dryrun.fewest_microbatches import with_fewest_microbatches
from pretrain.planning.seconds.hardware import Hardware
from pretrain.progress import Progress
from tools.plan.layouts import Estimate, recommended

_BLOCK_S = 0.06
"""Seconds that a core takes for one microbatch of a block, forward and backward."""
_PATIENCE_S = 60.0
"""Seconds of a dry run that nobody asked for."""


def reason_not_to_count(found: Sequence[Estimate], num_gpus: int, hardware: Hardware) -> str | None:
    """Reason that a plan does not count by itself what it recommends; None: it does."""
    best = recommended(found, hardware)
    if best is None:
        return None
    if best.config.model.memory is not None and find_spec("triton") is None:
        return "triton is not installed, whose kernels a dry run counts (pip install -e '.[gpu]')"
    config = with_fewest_microbatches(best.config, num_gpus)
    num_microbatches = Division.of(config, num_gpus).num_microbatches
    seconds = _BLOCK_S * num_microbatches * stages_of(config)[best.fullest_stage].blocks.num
    if seconds > _PATIENCE_S:
        return (
            f"a step of {num_microbatches} microbatches takes some {seconds / 60:.0f} minutes to count (--count 1 does)"
        )
    return None


def with_counts(found: Sequence[Estimate], number: int, num_gpus: int, hardware: Hardware) -> list[Estimate]:
    """The estimates, some of them with the bytes that dry runs count on their fullest stages.

    The recommended one comes first, and while that does not fit after all, the next that is recommended; then the fastest.

    Args:
        found: estimates, the fastest first.
        number: layouts to count; more if the first of them do not fit.

    Raises:
        ConfigError: a layout has what a dry run cannot follow.
    """
    found = list(found)
    num_counted = 0
    with Progress("dry run", total=number, leave=False) as progress:
        # The stand-in for CUDA wants a machine without, and nothing is computed.
        hide_gpus()
        from pretrain.planning.dryrun.rank import dry_run

        while (best := recommended(found, hardware)) is not None:
            fitting = (each for each in found if each.fits(hardware))
            chosen = next((each for each in (best, *fitting) if each.counted is None), None)
            if chosen is None or (num_counted >= number and chosen is not best):
                break
            rank = chosen.fullest_stage * (num_gpus // chosen.config.parallel.pipeline)
            config = with_fewest_microbatches(chosen.config, num_gpus)
            (report,) = dry_run(config, num_gpus, [rank], as_gpu=True)
            counted = replace(chosen, counted=report.peak_of_step.by_part)
            found = [counted if each is chosen else each for each in found]
            num_counted += 1
            progress.update(1 if num_counted <= number else 0)
    return found
