"""`python -m lab.maintenance.check_plan`: bytes that plans predict of configurations, beside those of dry runs, and what
passes between host and GPU beside its budget."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from lab.maintenance.stage_sent import stages_sent
from megamem import start
from megamem.config.model import ModelConfig
from megamem.parameters.trained_part import ALL
from megamem.placement.block_plan import PLAIN, BlockPlan, plan_blocks
from parallel.machine.devices import hide_gpus
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_stages
from pretrain.config.updates import keeps_rows
from pretrain.config.validate import validate
from pretrain.planning.bytes.memory import stage_bytes
from tools import cli
from tools.common.vocabulary import with_vocabulary
from tools.common.words import plural

if TYPE_CHECKING:
    from lab.maintenance.agreement import Figure

CONFIGS = Path(__file__).parents[2] / "configs"
OF_STUDIES = Path(__file__).parents[1] / "configs"
# Folders of files without a model: hardware, clusters, tuning.
_NO_MODELS = ("hardware", "clusters", "tuning")
_VOCABULARY = 4096
"""Vocabulary of configurations that leave it to the tokenizer."""

_BLOCKS_OF_CHUNK = 4

_EPILOG = """\
examples:
  make check-plan
  python -m lab.maintenance.check_plan configs/ultramemv2/2.5b_120b_top256.yaml --set parallel.tensor=2 --set train.recompute=none

All of configs/, as `make check-plan` runs them: docs/planning.md says how long that takes, and what agrees how well.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check as a program of its own, with the exit codes and messages of `megamem`."""
    return start.main(argv, _parser)


def _parser() -> argparse.ArgumentParser:
    parser = cli.SuggestingParser(
        prog="check_plan",
        description="Dry-run the first and the last stage of every configuration as on a GPU, with the fewest blocks that "
        "are of all its kinds, on the fewest ranks on which each of its axes has two, with as many microbatches as fill "
        "its pipeline. Compare with the closed formulas of `megamem plan`: weights, gradients and optimizer state to 2 "
        "%%, activations to 10 %%, what is exchanged to the byte. Hold a step, an evaluation, a save, a restore and a "
        "generated text to the budgets of traffic between host and GPU. A line for each; ends with 1 if one is outside.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("configs", metavar="CONFIG", nargs="*", help="YAML files (default: all that are shipped)")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", dest="overrides", help="set a key")
    parser.add_argument(
        "--as-cpu",
        action="store_true",
        help="count with the CPU's branches, and without the scratch of a GPU's operations; no traffic",
    )
    parser.add_argument("--all-blocks", action="store_true", help="keep all blocks, and not the fewest of all kinds")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that share them (default: 1)")
    parser.add_argument("--all", action="store_true", help="print every figure, and not the worst ones alone")
    parser.set_defaults(func=run_check_plan)
    return parser


def run_check_plan(args: argparse.Namespace) -> int:
    """Compares and prints."""
    hide_gpus()
    started_s = time.monotonic()
    runs = [
        (name, *on_few_ranks(config if args.all_blocks else with_few_blocks(config)))
        for name, config in _runs(args.configs or shipped_models(), args.overrides)
    ]
    worst: dict[str, tuple[Figure, str]] = {}
    num_outside = 0
    for number, (name, num_ranks, (found, beyond)) in enumerate(_checked(runs, args.workers, args.as_cpu), start=1):
        fails = [figure for figure in found if not figure.agrees]
        num_outside += bool(fails or beyond)
        of_run = worst_by_kind(found)
        print(f"{number:>{len(str(len(runs)))}}/{len(runs)} {_line(name, num_ranks, of_run, fails)}", flush=True)
        for excess in beyond:
            print(f"    OUTSIDE {excess}", flush=True)
        if args.all:
            for figure in found:
                print(f"    {figure.name:28}{figure.predicted:>18,.0f}{figure.counted:>18,.0f}{_percent(figure)}")
        for kind, figure in of_run.items():
            if kind not in worst or abs(figure.error) > abs(worst[kind][0].error):
                worst[kind] = figure, name
    print(f"{plural(len(runs), 'configuration')} in {(time.monotonic() - started_s) / 60:.1f} min; the farthest off:")
    for kind, (figure, name) in worst.items():
        print(f"  {kind:12}{_percent(figure)}  {name}: {figure.name}")
    if num_outside:
        print(f"{plural(num_outside, 'configuration')} outside of the limits", file=sys.stderr)
    return int(num_outside > 0)


def _checked(
    runs: Sequence[tuple[str, RunConfig, int]], num_workers: int, as_cpu: bool
) -> Iterator[tuple[str, int, tuple[list[Figure], list[str]]]]:
    """Names, ranks, and what is found of each, in their order; by forks of this process, if there are to be several."""
    if num_workers == 1:
        yield from ((name, ranks, compare(config, ranks, as_gpu=not as_cpu)) for name, config, ranks in runs)
        return
    # Once, and not in every fork.
    import lab.stand_in.watched  # noqa: F401

    with ProcessPoolExecutor(num_workers, get_context("fork"), _with_one_thread) as pool:
        found = pool.map(
            partial(compare, as_gpu=not as_cpu), *zip(*((config, n) for _, config, n in runs), strict=True)
        )
        yield from ((name, ranks, of_run) for (name, _, ranks), of_run in zip(runs, found, strict=True))


def _with_one_thread() -> None:
    """As many processes as cores: threads would wait for each other."""
    import torch

    torch.set_num_threads(1)


def _runs(paths: Sequence[str], overrides: Sequence[str]) -> Iterator[tuple[str, RunConfig]]:
    """Configurations by name, of every stage of every file."""
    for path in paths:
        for config in load_stages(path, overrides):
            yield path + (f" ({config.stage.name})" if config.stage is not None else ""), config


def shipped_models() -> list[str]:
    """The files of `configs`, and of the laboratory's, that name a model."""
    return [
        str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
        for path in sorted((*CONFIGS.rglob("*.yaml"), *OF_STUDIES.rglob("*.yaml")))
        if path.parent.name not in _NO_MODELS
        and path.stem not in ("base", "recipe", "three_phases", "growth", "growth_memory")
    ]


def with_few_blocks(config: RunConfig) -> RunConfig:
    """The configuration with the fewest blocks, but at least four in a chunk, that has all kinds of its blocks.

    Formulas of bytes are sums over blocks, and budgets count by what is there; with fewer blocks what passes by once, and
    is known less well, would weigh more than it does.
    """
    layout, model = config.parallel, config.model
    # What all blocks read at once is as large whatever their number.
    reads_once = model.memory is not None and model.memory.reads_once
    if reads_once or layout.pipeline_layout is not None or config.optimizer.trained != ALL:
        return config
    chunks = layout.pipeline * layout.virtual_pipeline
    for number in range(_BLOCKS_OF_CHUNK * chunks, model.num_layers, chunks):
        try:
            fewer = replace(model, num_layers=number)
        except ValueError:
            # Its memories are placed or shared in more of them.
            continue
        if _kinds(fewer) == _kinds(model):
            return replace(config, model=fewer)
    return config


def _kinds(model: ModelConfig) -> set[tuple[BlockPlan, tuple[bool, ...]]]:
    """Kinds of blocks, and whether their memories share a bank."""
    memory = model.memory
    views = () if memory is None else model.memory_plan.views
    shared = Counter(view.bank for view in views)
    plans = plan_blocks(model)
    return {
        (replace(plan, memories=()), tuple(shared[views[index].bank] > 1 for index in plan.memories))
        for plan in (plans.get(block, PLAIN) for block in range(model.num_layers))
    }


def on_few_ranks(config: RunConfig) -> tuple[RunConfig, int]:
    """The configuration in a world in which every axis has two ranks or more, with few microbatches, and the world.

    Tables and the rest have two replicas at least; tables whose gradients are the rows that were read have one, and two
    parts. The batch has as many microbatches left as a stage can have in
    flight. A vocabulary that is the tokenizer's is set.
    """
    layout, train = config.parallel, config.train
    replicated = 2 * layout.tensor * layout.context
    of_stage = math.lcm(replicated, 2 * layout.memory)
    if keeps_rows(config.optimizer):
        config = replace(config, parallel=replace(layout, memory=of_stage))
    num_ranks = layout.pipeline * of_stage
    rounds = layout.pipeline * (2 if layout.virtual_pipeline > 1 else 1)
    batch = rounds * train.micro_batch_size * of_stage // (layout.tensor * layout.context)
    config = with_vocabulary(config, _VOCABULARY)
    smaller = replace(config, train=replace(train, global_batch_size=batch, batch_ramp=None))
    return smaller, num_ranks


def compare(config: RunConfig, num_ranks: int, *, as_gpu: bool) -> tuple[list[Figure], list[str]]:
    """All figures of the first and the last stage, counted with a GPU's branches or with the CPU's; and as on a GPU the
    traffic beyond budgets, in sentences.

    Raises:
        ConfigError: the configuration is not valid on so many ranks.
    """
    anywhere = replace(config, train=replace(config.train, kernels="auto"))
    config = replace(validate(anywhere, num_ranks, on_this_machine=False), train=config.train)
    from lab.maintenance.agreement import figures
    from lab.stand_in.watched import watched_run
    from pretrain.planning.dryrun.rank import dry_run, first_ranks_of_stages

    firsts = first_ranks_of_stages(config, num_ranks)
    held, sent = stage_bytes(config, num_ranks, on_gpu=as_gpu), stages_sent(config, num_ranks)
    ranks = sorted({firsts[0], firsts[-1]})
    found, beyond, reports = [], [], []
    if as_gpu:
        for rank in watched_run(config, num_ranks, ranks, all_commands=True):
            reports.append(rank.counted)
            beyond += [f"stage {rank.counted.stage}, {excess}" for excess in rank.excesses]
    else:
        reports += dry_run(config, num_ranks, ranks)
    for report in reports:
        for figure in figures(report, held[report.stage], sent[report.stage]):
            found.append(replace(figure, name=f"stage {report.stage}, {figure.name}"))
    return found, beyond


def worst_by_kind(figures: Sequence[Figure]) -> dict[str, Figure]:
    """The figure that is farthest off of what is held between steps, of activations, and of what is sent."""
    kinds = {
        "held": [f for f in figures if "sent" not in f.name and "activations" not in f.name],
        "activations": [f for f in figures if "activations" in f.name],
        "sent": [f for f in figures if "sent" in f.name],
    }
    return {kind: max(of_kind, key=lambda f: abs(f.error)) for kind, of_kind in kinds.items() if of_kind}


def _line(name: str, num_ranks: int, worst: Mapping[str, Figure], fails: Sequence[Figure]) -> str:
    """Name, ranks, the worst error of each kind, and what is outside of its limit."""
    cells = "".join(f"  {kind}{_percent(figure)}" for kind, figure in worst.items())
    bad = "; ".join(
        f"{figure.name}: {figure.predicted:,.0f} predicted, {figure.counted:,.0f} counted" for figure in fails
    )
    return f"{name:46}{num_ranks:>5} ranks{cells}  {'OUTSIDE ' + bad if fails else 'ok'}"


def _percent(figure: Figure) -> str:
    return f"{100 * figure.error:>+8.2f} %"


if __name__ == "__main__":
    sys.exit(main())
