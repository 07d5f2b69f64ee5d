"""Running a command's work on ranks: those that somebody started, or our own."""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parallel.machine.devices import hide_gpus, num_visible_gpus, unseen_gpus
from parallel.processes.ranks import current_ranks, said_by_variables_alone
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.run.started_ranks import started_ranks
from tools.common.words import ending


def default_num_ranks(parallel: ParallelConfig) -> int:
    """One rank per visible GPU, or as few as the layout needs."""
    return num_visible_gpus() or fewest_ranks(parallel)


def ranks_for_stages(stages: Sequence[RunConfig]) -> int:
    """One rank per visible GPU, or as few as the layouts of all stages can share."""
    return num_visible_gpus() or math.lcm(*(fewest_ranks(config.parallel) for config in stages))


def fewest_ranks(parallel: ParallelConfig) -> int:
    """Ranks of the layout without more data parallelism than the memory group needs."""
    return parallel.pipeline * math.lcm(parallel.tensor * parallel.context, parallel.memory)


def at_least_one_rank(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} ranks cannot be started: give 1 or more")
    return number


def add_nproc(
    parser: argparse.ArgumentParser, meaning: str, *, what: str = "ranks to start here", default: int | None = None
) -> None:
    """Adds `--nproc` and `--device`; where `--nproc` is not given, it is `default`, and `meaning` says what that means."""
    parser.add_argument(
        "--nproc", type=at_least_one_rank, default=default, metavar="N", help=f"{what} (default: {meaning})"
    )
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`, which has taken effect when the arguments are parsed."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        action=_DeviceAction,
        help="auto: the GPUs if there are any, which must work then; cpu: leave them idle (default: auto)",
    )


class _DeviceAction(argparse.Action):
    """Hides the GPUs while the arguments are parsed: before anybody has imported torch."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, value)
        if value == "cpu":
            hide_gpus()


def started_world_size() -> int | None:
    """Ranks that torchrun or Slurm started, this process being one of them; None if nobody did.

    Raises:
        ConfigError: the environment contradicts itself.
    """
    ranks = started_ranks()
    return None if ranks is None else ranks.world_size


def current_rank_is_first() -> bool:
    """True if this process speaks for all: the only one so far, or rank 0 of those that were started."""
    ranks = current_ranks()
    return ranks is None or ranks.rank == 0


def end_ranks_that_wait(args: argparse.Namespace, error: BaseException) -> None:
    """Tell the other ranks of a command's error, if torchrun or Slurm started some and they do not know it.

    Where nothing but variables speaks of others, they may be what is wrong, and that is said.
    """
    # A command without ranks of its own may be started under srun too: nobody waits for it.
    if not hasattr(args, "nproc"):
        return
    if variables := said_by_variables_alone():
        print(f"note: {variables}.", file=sys.stderr)
    try:
        ranks = current_ranks()
    except ValueError:
        return
    if ranks is not None:
        from parallel.processes.failure_watch import tell_who_waits

        sys.stderr.flush()
        tell_who_waits(ranks, error)


def import_engine() -> None:
    """Import what ranks need, once, before they are forked: each would take seconds to import it by itself."""
    with unseen_gpus():
        _import_engine()


def _import_engine() -> None:
    """Import it without collections of garbage: they take a fifth of the time, and find none among modules."""
    gc.disable()
    try:
        from pretrain.evaluation import generate, restore  # noqa: F401
        from pretrain.train import callbacks, loop, stage_loop  # noqa: F401
    finally:
        gc.enable()


def run_on_ranks(main: Callable[[], None], num_ranks: int, *, log_dir: Path | None = None) -> int:
    """Run `main` on this rank if ranks were started already, else on `num_ranks` new ones.

    Returns:
        The exit code: of the first rank that failed, whose error is then the last thing on the screen, or 0.
    """
    if started_world_size() is not None:
        _import_engine()
        main()
        return 0
    from parallel.processes.launch import LaunchError, launch_ranks

    import_engine()
    try:
        launch_ranks(main, num_ranks, log_dir=log_dir)
    except LaunchError as error:
        sys.stdout.flush()
        # A progress line may have been left open.
        print(f"\n{ending(error, error.exit_code)}", file=sys.stderr)
        return error.exit_code
    return 0
