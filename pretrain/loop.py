"""The training loop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from types import FrameType

from megatron.core import tensor_parallel

from megamem.moe import ROUTER_LOSS_NAMES
from megamem.parameters import GroupName
from parallel.rank_process import STOP_SIGNALS
from pretrain.callbacks import Callback, Row
from pretrain.errors import StoppedEarly, UserError
from pretrain.run import Run
from pretrain.schedule import apply_schedule, group_settings
from pretrain.step import Batch, StepResult, train_step


def train(run: Run, callbacks: Sequence[Callback], stop: StopRequest | None = None) -> None:
    """Train to the configured number of steps.

    Args:
        stop: heeded from before the run was opened; None: from now on.

    Raises:
        StoppedEarly: a rank was told to stop (SIGTERM, SIGINT or SIGUSR1); a checkpoint was saved.
        UserError: too many steps in a row had no finite gradient, the data is damaged, or a checkpoint cannot be
            written.
    """
    config = run.config
    stop = stop or StopRequest()
    batches = run.batches()
    for callback in callbacks:
        callback.on_start(run)
    try:
        while run.state.step < config.train.num_steps:
            result, row = take_step(run, batches, stop_requested=stop.requested)
            for callback in callbacks:
                callback.on_step(run, row)
            _check_progress(run)
            if result.stop_requested and run.state.step < config.train.num_steps:
                break
        for callback in callbacks:
            callback.on_end(run)
    except BaseException:
        # Perhaps of this rank alone, so nothing that asks the others may follow.
        run.saver.abandon()
        raise
    if run.state.step < config.train.num_steps:
        raise StoppedEarly(
            f"stopped at step {run.state.step} of {config.train.num_steps} as asked; "
            f"a checkpoint was saved in {run.folder.checkpoints}: run the same command again to go on"
        )


def take_step(run: Run, batches: Sequence[Iterator[Batch]], *, stop_requested: bool = False) -> tuple[StepResult, Row]:
    """One step of a run, whose state moves on: what it did, and its metrics row.

    `batches` are streams of microbatches, one per model chunk, from where the run stands.
    """
    config = run.config
    started = time.perf_counter()
    seed_step(config.seed, run.state.step)
    apply_schedule(run.optimizer.param_groups, run.state.step, config.optimizer, config.train)
    result = train_step(
        run.chunks,
        run.optimizer,
        batches,
        run.groups,
        num_microbatches=run.num_microbatches,
        micro_batch_size=config.train.micro_batch_size,
        sequence_length=config.train.sequence_length,
        stop_requested=stop_requested,
        save_votes=run.saver.votes,
    )
    run.saver.hear(result.ranks_saved, result.ranks_failed_to_save)
    return result, _account(run, result, time.perf_counter() - started)


def seed_step(seed: int, step: int) -> None:
    """Seed every random state from (seed, step), so that a resumed step draws what the uninterrupted one drew."""
    tensor_parallel.model_parallel_cuda_manual_seed((seed * 1_000_003 + step) % 2**31, force_reset_rng=True)


def _account(run: Run, result: StepResult, step_s: float) -> Row:
    """Move the run's state on, and make the step's metrics row."""
    config = run.config
    rates = _learning_rates(run)
    run.state = run.state.after_step(
        samples=config.train.global_batch_size, tokens=run.tokens_per_step, updated=result.norms.are_finite
    )
    tokens_per_s = run.tokens_per_step / step_s
    row: Row = {
        "step": run.state.step,
        "loss": result.loss.mean,
        "grad_norm": result.norms.main,
        "lr": rates["backbone"],
        "consumed_samples": run.state.consumed_samples,
        "consumed_tokens": run.state.consumed_tokens,
        "num_skipped": run.state.num_skipped,
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tflops_per_gpu": tokens_per_s * run.flops_per_token / run.groups.world_size / 1e12,
    }
    if config.model.memory is not None:
        row["value_lr"] = rates["values"]
    if result.norms.tables is not None:
        row["value_grad_norm"] = result.norms.tables
    for name, of_block in result.auxiliary.items():
        row[name] = fmean(of_block.values())
        by_block = row.setdefault("moe" if name in ROUTER_LOSS_NAMES else "memory", {})
        for block, value in of_block.items():
            by_block.setdefault(str(block), {})[name] = value
    return row


def _learning_rates(run: Run) -> dict[GroupName, float]:
    """The learning rate of every group in the step just taken: what this rank's groups still carry.

    A stage without split parameters has no such groups, and says what the schedule gives those of other stages.
    """
    scheduled = group_settings(run.state.step, run.config.optimizer, run.config.train)
    carried: dict[GroupName, float] = {group["name"]: group["lr"] for group in run.optimizer.param_groups}
    return {name: lr for name, (lr, _) in scheduled.items()} | carried


def _check_progress(run: Run) -> None:
    skipped, limit = run.state.num_skipped_in_row, run.config.train.max_skipped_steps
    if skipped >= limit:
        # All ranks are here.
        run.saver.finish()
        raise UserError(
            f"the last {skipped} steps had no finite gradient and were skipped (train.max_skipped_steps = {limit}): "
            f"the run has diverged at step {run.state.step}. Lower optimizer.lr, or raise optimizer.warmup_steps; "
            f"the last checkpoint in {run.folder.checkpoints} is intact"
        )


class StopRequest:
    """Whether this rank was told to stop: SIGTERM, SIGINT and SIGUSR1 let the step finish and the run save.

    One that is ignored stays so: a shell asks for that with SIGINT when it starts a job in the background.
    """

    def __init__(self) -> None:
        self.requested = False
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
