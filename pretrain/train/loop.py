"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean

from megatron.core import tensor_parallel

from megamem.backbone.moe import ROUTER_LOSS_NAMES
from megamem.parameters.declaration import GroupName
from pretrain.config.schedule import apply_schedule, group_settings
from pretrain.config.updates import MUON
from pretrain.engine.nonfinite import describe_non_finite
from pretrain.engine.step import Batch, StepResult, train_step
from pretrain.errors import StoppedEarly, UserError
from pretrain.run.history import Incident, now
from pretrain.run.stop import StopRequest
from pretrain.train.callback import Callback, Callbacks, Row
from pretrain.train.health.rewind import rewind
from pretrain.train.health.spikes import find_spike, remember
from pretrain.train.run import Run


def train(run: Run, callbacks: Iterable[Callback], stop: StopRequest | None = None) -> None:
    """Train to the configured number of steps.

    Args:
        callbacks: the work besides training, in any order.
        stop: heeded from before the run was opened; None: from now on.

    Raises:
        StoppedEarly: a rank was told to stop (SIGTERM, SIGINT or SIGUSR1); a checkpoint was saved.
        UserError: too many steps in a row had no finite gradient or a spike, the data is damaged, or a checkpoint
            cannot be written.
    """
    config, everyone = run.config, Callbacks(callbacks)
    run.stop.request = stop or StopRequest()
    batches = run.batches()
    try:
        everyone.on_start(run)
        # No checkpoint has what waits for the next update of tables.
        while run.state.step < config.train.num_steps and not (run.stop.known and run.state.num_waiting == 0):
            result, row = take_step(run, batches, stop_requested=run.stop.requested)
            _tell(run, everyone, result)
            if result.spike and config.health.spikes.action == "rewind" and _went_back(run, everyone, result.spike):
                batches = run.batches()
                continue
            run.stop.known |= result.stop_requested
            everyone.on_step(run, row)
            _check_progress(run, result)
        everyone.on_end(run)
    except BaseException:
        # Perhaps of this rank alone, so nothing that asks the others may follow.
        run.saver.abandon()
        everyone.on_failure(run)
        raise
    if run.state.num_finished < config.train.num_steps:
        owed = ", with the evaluation of this step first" if run.state.owes_evaluation else ""
        raise StoppedEarly(
            f"stopped at step {run.state.step} of {config.run_steps} as asked; "
            f"a checkpoint was saved in {run.folder.checkpoints}: run the same command again to go on{owed}"
        )


def take_step(run: Run, batches: Sequence[Iterator[Batch]], *, stop_requested: bool = False) -> tuple[StepResult, Row]:
    """One step of a run, whose state moves on: what it did, and its metrics row.

    `batches` are streams of microbatches, one per model chunk, from where the run stands.
    """
    config = run.config
    started = time.perf_counter()
    seed_step(config.seed, run.state.step)
    apply_schedule(run.optimizer.param_groups, run.state.step, config.optimizer, config.train, config.stage)
    with run.rows_at_hand():
        result = train_step(
            run.chunks,
            run.optimizer,
            batches,
            run.groups,
            num_microbatches=run.num_microbatches,
            micro_batch_size=config.train.micro_batch_size,
            sequence_length=config.train.sequence_length,
            stop_requested=stop_requested,
            save_progress=run.saver.progress,
            judge=partial(find_spike, config.health.spikes, run.state.recent),
            graph=run.graph,
            updates_tables=run.state.updates_tables,
        )
    run.saver.note_ranks(result.ranks_saved, result.ranks_failed_to_save)
    return result, _account(run, result, time.perf_counter() - started)


def seed_step(seed: int, step: int) -> None:
    """Seed every random state from (seed, step), so that a resumed step draws what the uninterrupted one drew."""
    tensor_parallel.model_parallel_cuda_manual_seed((seed * 1_000_003 + step) % 2**31, force_reset_rng=True)


def _account(run: Run, result: StepResult, step_s: float) -> Row:
    """Move the run's state on, and make the step's metrics row."""
    config = run.config
    rates = _learning_rates(run)
    rule = config.health.spikes
    tokens_per_s = run.tokens_per_step / step_s
    run.state = run.state.after_step(
        samples=run.batch_size,
        tokens=run.tokens_per_step,
        updated=result.updated,
        spike=result.spike is not None,
        recent=remember(rule, run.state.recent, result.loss.mean, result.norms.main),
    )
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
    if rule.action != "none":
        row |= {"num_spikes": run.state.num_spikes, "num_rewinds": run.state.num_rewinds}
    if config.model.memory is not None:
        row["value_lr"] = rates["values"]
    if result.norms.tables is not None:
        row["value_grad_norm"] = result.norms.tables
    if result.ahead:
        row["loss_ahead"] = {str(n): value for n, value in result.ahead.items()}
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
    scheduled = group_settings(run.state.step, run.config.optimizer, run.config.train, run.config.stage)
    # Matrices that Muon updates, and what muP gives other rates, have the rate of their group times a constant.
    carried: dict[GroupName, float] = {
        group["name"]: group["lr"]
        for group in run.optimizer.param_groups
        if group.get("rule") != MUON.name and group.get("rate_factor", 1.0) == 1.0
    }
    return {name: lr for name, (lr, _) in scheduled.items()} | carried


def _went_back(run: Run, everyone: Callbacks, spike: str) -> bool:
    """Go back from a spike, and tell everyone; without a checkpoint the step stays skipped."""
    step = run.state.step
    done = rewind(run, spike)
    if done is None:
        return False
    everyone.on_incident(run, Incident(step, "rewind", done, now()))
    everyone.on_rewind(run)
    return True


def _tell(run: Run, everyone: Callbacks, result: StepResult) -> None:
    """Tell everyone of a step whose update was not applied."""
    if result.updated:
        return
    if result.spike is not None:
        kind, found = "spike", f"{result.spike}; its update was not applied"
    else:
        kind, found = "non-finite", f"{describe_non_finite(result.non_finite)}; the update was not applied"
    everyone.on_incident(run, Incident(run.state.step, kind, found, now()))


def _check_progress(run: Run, result: StepResult) -> None:
    skipped, limit = run.state.num_skipped_in_row, run.config.train.max_skipped_steps
    if skipped >= limit and not result.updated:
        # All ranks are here.
        run.saver.finish()
        last = result.spike or describe_non_finite(result.non_finite)
        raise UserError(
            f"the last {skipped} steps had {'a spike or ' if run.config.health.spikes.action != 'none' else ''}"
            f"no finite gradient and were skipped (train.max_skipped_steps = {limit}): "
            f"the run has diverged at step {run.state.step}. In the last one, {last}. Lower optimizer.lr, or raise "
            f"optimizer.warmup_steps; the last checkpoint in {run.folder.checkpoints} is intact"
        )
