"""Callbacks of a run: evaluation, checkpoints, what it shows and records, and its health."""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megamem.layers.usage import UsageCollector
from megamem.placement.block_plan import paired_in_attention
from pretrain.checkpoint.saver import SaveReport
from pretrain.engine.chunks import unwrap
from pretrain.evaluation.evaluate import Evaluation, EvaluationStopped, evaluate
from pretrain.progress import Progress
from pretrain.run.history import End, Incident, Start, now, write_event
from pretrain.run.owner import Owner
from pretrain.train.callback import Callback, Priority, Row
from pretrain.train.health.hangs import Hangs, NextStep, hang_limit_s
from pretrain.train.health.memories import NUM_OBSERVED, describe_faults, figures_by_block, find_faults
from pretrain.train.health.replicas import Replicas
from pretrain.train.health.slow_ranks import SlowRanks
from pretrain.train.run import Run
from pretrain.train.trackers import MetricsFile, TensorBoard, WandB, observes_usage


class Ownership(Callback):
    """Stop a run whose folder another one has taken over, before it writes. Rank 0 only."""

    priority = Priority.GUARD

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def on_start(self, run: Run) -> None:
        self._owner.check()

    def on_step(self, run: Run, row: Row) -> None:
        self._owner.check()

    def on_end(self, run: Run) -> None:
        self._owner.check()


class MemoryUsage(Callback):
    """Add to the row how the memory was used, on one step of every so many. All ranks.

    It observes the whole step: all its microbatches on all ranks, in training only. Figures go by block: of two memories
    in one, that in attention, whose rows its tokens name, is not observed.
    """

    priority = Priority.MEASURE

    def on_start(self, run: Run) -> None:
        unobserved = paired_in_attention(run.config.model)
        layers = [
            layer for chunk in run.chunks for layer in unwrap(chunk).memory_layers if layer.name not in unobserved
        ]
        self._collectors = [
            UsageCollector(
                [layer for layer in layers if layer.memory.kind == memory.kind],
                num_blocks=run.config.model.num_layers,
                observed=memory.observed,
                stage_group=run.groups.megatron.tp_dp_cp,
                device=run.groups.device,
            )
            for memory in run.config.model.memories
        ]
        self._start_if_due(run)

    def on_step(self, run: Run, row: Row) -> None:
        if observes_usage(run, run.state.step):
            # The spectrum is that of the updated cores.
            run.complete_weights()
            of_blocks = {block: each for collector in self._collectors for block, each in collector.finish().items()}
            for block, metrics in sorted(of_blocks.items()):
                if run.config.optimizer.trained_rows is not None:
                    # Keys that are not trained cannot collapse: a few texts to learn read few rows.
                    metrics.pop("even_coverage", None)
                row.setdefault("memory", {}).setdefault(str(block), {}).update(metrics)
        self._start_if_due(run)

    def on_rewind(self, run: Run) -> None:
        for collector in self._collectors:
            collector.stop()
        self._start_if_due(run)

    def _start_if_due(self, run: Run) -> None:
        if observes_usage(run, run.state.step + 1):
            for collector in self._collectors:
                collector.start()


class MemoryWatch(Callback):
    """Notice memories that drop out, once each while a run is trained, by what `MemoryUsage` has measured."""

    priority = Priority.JUDGE

    def __init__(self) -> None:
        self._observed: deque[Mapping[str, Mapping[str, Any]]] = deque(maxlen=NUM_OBSERVED)
        self._told: set[tuple[str, int]] = set()

    def on_step(self, run: Run, row: Row) -> None:
        if not observes_usage(run, run.state.step):
            return
        self._observed.append(row["memory"])
        new = [
            each for each in find_faults(figures_by_block(self._observed)) if (each.kind, each.block) not in self._told
        ]
        self._told |= {(each.kind, each.block) for each in new}
        for kind, message in describe_faults(new).items():
            self.callbacks.on_incident(run, Incident(run.state.step, kind, message, now()))


class History(Callback):
    """`history.jsonl`: where the run was started, what was noticed, and where it came to its end or was asked to stop. The
    owner only.

    An end says that all was saved; a start without one has failed, or goes on. Rows of `metrics.jsonl` stay those of an
    uninterrupted run.
    """

    priority = Priority.RECORD

    def on_start(self, run: Run) -> None:
        state = run.state
        write_event(
            run.folder, Start(state.step, state.consumed_tokens, now(), socket.gethostname(), run.groups.world_size)
        )

    def on_incident(self, run: Run, incident: Incident) -> None:
        write_event(run.folder, incident)

    def on_end(self, run: Run) -> None:
        write_event(run.folder, End(run.state.step, run.state.consumed_tokens, now()))


def _described_loss(loss: float) -> str:
    return "no target" if math.isnan(loss) else f"loss {loss:.4f}"


class ProgressLine(Callback):
    """Loss, tokens per second and time left, on stderr. Rank 0 only."""

    priority = Priority.WRITE

    def on_start(self, run: Run) -> None:
        self._progress = Progress("step", total=run.config.train.num_steps, initial=run.state.step)

    def on_step(self, run: Run, row: Row) -> None:
        self._progress.update(
            1,
            f"{_described_loss(row['loss'])} grad {row['grad_norm']:.2f} lr {row['lr']:.2e} "
            f"{row['tokens_per_s']:,.0f} tokens/s",
        )

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self._progress.say(
            f"step {run.state.step}: validation loss {evaluation.loss:.4f}, "
            f"{evaluation.bits_per_byte:.4f} bits per byte"
        )

    def on_save(self, run: Run, report: SaveReport) -> None:
        self._progress.say(str(report))

    def on_incident(self, run: Run, incident: Incident) -> None:
        self._progress.say(f"step {incident.step}: {incident.kind}: {incident.message}")

    def on_rewind(self, run: Run) -> None:
        self._progress.close()
        self.on_start(run)

    def on_end(self, run: Run) -> None:
        self._progress.close()


class Checkpoints(Callback):
    """Save every so many steps, and at the end, and say what is complete. All ranks.

    A save that is due waits for the update of tables, before which no checkpoint has all of the run.
    """

    priority = Priority.SAVE

    def __init__(self) -> None:
        self._is_due = False

    def on_step(self, run: Run, row: Row) -> None:
        run.saver.advance()
        every = run.config.checkpoint.every_steps
        self._is_due |= every > 0 and run.state.step % every == 0
        if self._is_due and run.state.num_waiting == 0:
            run.save()
            self._is_due = False
        self._tell(run)

    def on_rewind(self, run: Run) -> None:
        self._is_due = False

    def on_end(self, run: Run) -> None:
        run.save()
        run.saver.finish()
        self._tell(run)

    def _tell(self, run: Run) -> None:
        for report in run.saver.reports:
            self.callbacks.on_save(run, report)
        run.saver.reports.clear()


def _may_stop(run: Run) -> bool:
    """Ask all ranks whether one was told to stop, unless a stop has to wait for the update of tables. Collective."""
    return run.state.num_waiting == 0 and run.stop.ask(run.groups.device)


class Evaluations(Callback):
    """Evaluate every so many steps, and after the last one. All ranks.

    Data without held-out documents is not evaluated. An evaluation that a stop passes over is made up for when the run
    goes on.
    """

    priority = Priority.EVALUATE

    def on_start(self, run: Run) -> None:
        if run.state.owes_evaluation:
            self._evaluate(run)

    def on_step(self, run: Run, row: Row) -> None:
        every = run.config.evaluation.every_steps
        last = run.state.step == run.config.train.num_steps
        if last or (every and run.state.step % every == 0):
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        run.state = replace(run.state, owes_evaluation=False)
        if not len(run.held_out):
            return
        try:
            evaluation = evaluate(
                run.chunks,
                run.held_out,
                run.groups,
                micro_batch_size=run.config.train.micro_batch_size,
                pipeline=run.config.parallel.pipeline,
                stopped=partial(_may_stop, run),
            )
        except EvaluationStopped:
            run.state = replace(run.state, owes_evaluation=True)
            return
        self.callbacks.on_evaluation(run, evaluation)


def default_callbacks(run: Run, owner: Owner | None = None) -> list[Callback]:
    """The callbacks that the configuration asks for, on this rank; if it owns the folder, also those that guard it and
    record who trained in it."""
    callbacks: list[Callback] = [Evaluations(), Checkpoints()]
    if owner is not None:
        callbacks += [Ownership(owner), History()]
    if run.config.model.memory is not None and run.config.logging.memory_every_steps:
        callbacks += [MemoryUsage(), MemoryWatch()]
    if run.groups.is_main:
        callbacks += [MetricsFile(), ProgressLine()]
        if run.config.logging.tensorboard:
            callbacks.append(TensorBoard())
        if run.config.logging.wandb_mode != "disabled":
            callbacks.append(WandB())
    return [*callbacks, *health_callbacks(run)]


def health_callbacks(run: Run) -> Iterator[Callback]:
    """Callbacks that look after a run's health, as far as the configuration asks for them."""
    rules = run.config.health
    if hang_limit_s(run.config):
        hangs = Hangs(run)
        yield from (hangs, NextStep(hangs))
    if run.groups.world_size > 1 and rules.slow_ranks.every_steps:
        yield SlowRanks()
    if run.groups.world_size > 1 and rules.compare_replicas_every_steps:
        yield Replicas()
