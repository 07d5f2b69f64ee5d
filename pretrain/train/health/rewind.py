"""Going back from a spike: to the newest checkpoint, and on with other data."""

from __future__ import annotations

from pretrain.checkpoint.run_entries import restore_run
from pretrain.config.position import steps_before
from pretrain.errors import UserError
from pretrain.train.run import Run, agreed_checkpoint, resets_optimizer, training_samples


def rewind(run: Run, spike: str) -> str | None:
    """Take a run that has just met a spike back to the newest checkpoint from before it. Collective.

    Weights, moments and counters become those of the checkpoint; the position in the data stays behind the spike, and
    the state says which samples were passed over. Streams of microbatches have to be opened anew.

    Returns:
        The rewind, in words; None: the stage has no checkpoint to begin from yet, and nothing was done.

    Raises:
        UserError: the run went back too often, or no checkpoint can be read.
    """
    rule, spiked = run.config.health.spikes, run.state
    # One in flight is from before the spike.
    run.saver.finish()
    if spiked.num_rewinds >= rule.max_rewinds:
        raise UserError(
            f"step {spiked.step} is a spike ({spike}), and the run has gone back {spiked.num_rewinds} times already "
            f"(health.spikes.max_rewinds = {rule.max_rewinds}). Lower optimizer.lr or look at the data; the last "
            f"checkpoint in {run.folder.checkpoints} is intact"
        )
    saved, problems = agreed_checkpoint(
        run.folder.checkpoints, check_hashes=run.config.checkpoint.check_hashes, before=spiked.step
    )
    if saved is None or saved.step < steps_before(run.config.stage):
        return None
    run.complete_weights()
    settings, with_moments = run.config.optimizer, not resets_optimizer(run.config, saved)
    restored = restore_run(
        saved,
        run.chunks,
        run.optimizer,
        trained=settings.trained,
        tables_every=settings.tables_every,
        with_moments=with_moments,
    )
    run.state = spiked.back_at(restored)
    run.last_saved_step = saved.step
    # The samples that were passed over are missing at the end.
    run.train_data = training_samples(run.config, run.state, run.tokenizer, run.folder)
    first, end = run.state.passed_over[-1]
    damaged = "".join(f"; passed over a damaged checkpoint: {problem}" for problem in problems)
    return (
        f"went back to the checkpoint of step {saved.step}, and passed over samples {first:,} to {end:,} "
        f"(rewind {run.state.num_rewinds} of {rule.max_rewinds}){damaged}"
    )
