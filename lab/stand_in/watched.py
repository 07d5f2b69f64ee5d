"""A dry run's rank on a stand-in for a GPU, watched while it trains, evaluates, saves, restores and generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from lab.stand_in import commands
from lab.stand_in.budgets import CommandTraffic
from lab.stand_in.host_traffic import HostTraffic
from lab.stand_in.moved import MovedBytes
from lab.stand_in.order import Race
from lab.stand_in.order_watch import OrderWatch
from pretrain.config.schema import RunConfig
from pretrain.planning.dryrun.gpu import StandInGpu
from pretrain.planning.dryrun.rank import DryRank, RankReport, built_rank


@dataclass(frozen=True)
class WatchedRank:
    """Observations of one rank on a stand-in for a GPU.

    Attributes:
        counted: bytes, calls and kernels of a step.
        traffic: traffic between host and GPU in that step, and in other commands if they were run.
        races: accesses without an order, in that step, the next and other commands, if order was watched.
        moved: bytes that the device's operations moved in that step, by line, if they were counted.
    """

    counted: RankReport
    traffic: tuple[CommandTraffic, ...]
    races: tuple[Race, ...] = ()
    moved: Mapping[str, int] = field(default_factory=dict)

    @property
    def excesses(self) -> list[str]:
        """Sentences on traffic beyond its budget."""
        return [f"{each.command}: {excess}" for each in self.traffic for excess in each.excesses]


def watched_run(
    config: RunConfig,
    world_size: int,
    ranks: Sequence[int],
    *,
    in_order: bool = False,
    all_commands: bool = False,
    count_moved: bool = False,
) -> Iterator[WatchedRank]:
    """One step of each of these ranks, one after the other, in this process.

    Args:
        config: configuration that is valid on `world_size` ranks, with `model.vocab_size`.
        in_order: also take a second step, and watch the order of accesses to memory in both.
        all_commands: watch other commands too; generation for the first of the ranks alone, as it has a layout of its own.
        count_moved: also count the bytes that operations move (`lab.stand_in.moved`).

    Raises:
        ConfigError: the configuration has what a dry run cannot follow, or this process sees a GPU.
    """
    for number in ranks:
        gpu = StandInGpu()
        with built_rank(config, world_size, number, gpu=gpu) as rank:
            watched = _watched(rank, gpu, in_order=in_order, all_commands=all_commands, count_moved=count_moved)
        if all_commands and number == ranks[0]:
            traffic, races = commands.generation(config, in_order=in_order)
            watched = replace(watched, traffic=(*watched.traffic, traffic), races=(*watched.races, *races))
        yield watched


def _watched(rank: DryRank, gpu: StandInGpu, *, in_order: bool, all_commands: bool, count_moved: bool) -> WatchedRank:
    moved, watch, order = MovedBytes(), HostTraffic(gpu), OrderWatch(gpu)
    with (
        moved.counting() if count_moved else nullcontext(),
        # Below the watch of order, which sees a Triton op as one access to each of its arguments.
        rank.working(moved.launch),
        order.watching() if in_order else nullcontext(),
    ):
        counted = rank.count_step(watch.watching())
        of_step = dict(moved.by_line()) if count_moved else {}
        if in_order:
            counted = replace(counted, next_collectives=rank.count_step().collectives)
        traffic = [_of_training(rank, watch)]
        if all_commands:
            traffic += [commands.evaluation(rank, gpu), commands.saving(rank, gpu), commands.restoring(rank, gpu)]
        return WatchedRank(counted, tuple(traffic), order.races, of_step)


def _of_training(rank: DryRank, watch: HostTraffic) -> CommandTraffic:
    """Traffic of the step that was watched, with the units that its budget counts by."""
    units = commands.units_of_passes(rank.chunks, rank.num_microbatches)
    units["mixture"] *= 2 if rank.config.train.recompute == "full" else 1
    units["window"] = rank.optimizer.num_windows
    return CommandTraffic("training", watch.findings(), units)
