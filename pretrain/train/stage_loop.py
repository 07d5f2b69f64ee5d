"""Training stage after stage, in one process per rank and across restarts.

Every stage is opened from the checkpoint that the one before it left, as it would be after a restart: so a run that is
killed between two stages, or anywhere else, goes on as if it had not been.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from parallel.groups import ParallelGroups
from pretrain.checkpoint.folder import SavedState
from pretrain.config.schema import RunConfig
from pretrain.config.stages import stage_of_step
from pretrain.engine.megatron import parallel_sizes
from pretrain.engine.session import relaid
from pretrain.errors import StoppedEarly
from pretrain.run.folder import RunFolder
from pretrain.run.stop import StopRequest
from pretrain.train.agreed_stop import AgreedStop
from pretrain.train.health.out_of_memory import out_of_memory_explained
from pretrain.train.run import Run, checkpoint_of_step, newest_checkpoint, open_run


def train_stages(
    stages: Sequence[RunConfig],
    folder: RunFolder,
    groups: ParallelGroups,
    train_one: Callable[[Run], None],
    stop: StopRequest,
    start: SavedState | None = None,
) -> bool:
    """Open the stage in which the run stands, have it trained, and go on with the next one until all are done.
    Collective.

    Args:
        stages: configurations of the run's stages, in order; one without a place is the whole run. If stages are
            trained one by one, the stage whose turn it is: nothing is done if it is done already.
        folder: the run's folder.
        groups: groups of the first stage's layout. Those of other stages' layouts take their place, within the same
            ranks.
        train_one: trains an opened stage to its end, and saves it. It must not keep the run: its memory is wanted.
        stop: heeded between two stages; within one that is left to `train_one`.
        start: the checkpoint that the run goes on from, while its own folder has none.

    Returns:
        True if any was opened: not if the last of `stages` is done and others come after it.

    Raises:
        StoppedEarly: a rank was told to stop, between two stages.
        UserError: a stage cannot be opened, as `open_run` says.
    """
    saved = newest_checkpoint(folder, groups, check_hashes=stages[0].checkpoint.check_hashes)
    checked = saved is not None
    saved = saved or start
    last_step = stages[-1].train.num_steps
    if saved is not None and last_step < stages[-1].run_steps and last_step <= saved.run.num_finished:
        return False
    number = 0 if saved is None else stage_of_step(stages, saved.run.num_finished)
    layout = parallel_sizes(stages[0])
    for config in stages[number:]:
        if parallel_sizes(config) != layout:
            groups, layout = relaid(config, groups), parallel_sizes(config)
        with out_of_memory_explained(config, groups.world_size):
            step = _train_one(open_run(config, folder, groups, saved, checked=checked), train_one)
        _free_memory()
        if config is not stages[-1]:
            # The next one reads what was written just now.
            saved, checked = checkpoint_of_step(folder, step), True
            _heed(stop, saved, stages[-1].run_steps, groups)
    return True


def _train_one(run: Run, train_one: Callable[[Run], None]) -> int:
    """Train an opened stage; the step at which it ended."""
    train_one(run)
    return run.state.step


def _free_memory() -> None:
    """Give back what the stage before held, for the next one to take."""
    # Models and optimizers are cycles.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _heed(stop: StopRequest, saved: SavedState, num_steps: int, groups: ParallelGroups) -> None:
    """Stop here if any rank was told to, and not after another stage has been opened."""
    if AgreedStop(stop).ask(groups.device):
        raise StoppedEarly(
            f"stopped at step {saved.step} of {num_steps} as asked, at the end of a stage; it was saved in {saved.path}: "
            "run the same command again to go on"
        )
