"""Callbacks of a run: logging, evaluation, checkpoints, health. The loop knows their base class alone."""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megamem.placement.block_plan import paired_in_attention
from megamem.usage import UsageCollector
from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import naming
from pretrain.checkpoint.folder import list_checkpoints
from pretrain.checkpoint.saver import SaveReport
from pretrain.config.loader import to_dict
from pretrain.engine.build import unwrap
from pretrain.evaluation.evaluate import Evaluation, EvaluationStopped, evaluate
from pretrain.progress import Progress
from pretrain.run.history import End, Incident, Start, now, write_event
from pretrain.run.owner import Owner
from pretrain.run.rows import NumberedRow, numbered_rows
from pretrain.train.callback import Callback, Row
from pretrain.train.health.hangs import Hangs, NextStep, hang_limit_s
from pretrain.train.health.memories import NUM_OBSERVED, course, findings, in_words
from pretrain.train.health.replicas import Replicas
from pretrain.train.health.slow_ranks import SlowRanks
from pretrain.train.run import Run


class Ownership(Callback):
    """Stop a run whose folder another one has taken over, before it writes. Rank 0 only, and first of all."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def on_start(self, run: Run) -> None:
        self._owner.check()

    def on_step(self, run: Run, row: Row) -> None:
        self._owner.check()

    def on_end(self, run: Run) -> None:
        self._owner.check()


class RowWriter(Callback):
    """Writer of the rows of steps that are logged, and those of evaluations. Rank 0 only."""

    def on_step(self, run: Run, row: Row) -> None:
        step, settings = run.state.step, run.config.logging
        if step % settings.every_steps == 0 or step == run.config.train.num_steps or observes_usage(run, step):
            self.write(row)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self.write({"step": run.state.step, **evaluation_row(evaluation)})

    def write(self, row: Row) -> None:
        """Keep a row, which names its step."""
        raise NotImplementedError


class MetricsFile(RowWriter):
    """`metrics.jsonl`: one object per step and per evaluation, with full precision.

    A resumed run first drops rows of steps past its checkpoint, so that the file reads as that of an uninterrupted run;
    so does one that goes back. The file of a run that has no checkpoint yet is set aside: its rows are all that is left
    of those steps.
    """

    def on_start(self, run: Run) -> None:
        self._path = run.folder.metrics
        stage = run.config.stage
        self._of_stage: Row = {} if stage is None else {"stage": stage.name}
        rows = list(numbered_rows(self._path, step=int))
        last = max((row.values["step"] for row in rows), default=0)
        if last > run.state.step and not list_checkpoints(run.folder.checkpoints):
            aside = self._set_aside()
            print(
                f"note: {run.folder.path} has rows of {last:,} steps and no checkpoint: the run was ended before its first "
                f"one was complete. It starts again at step {run.state.step:,}; those rows are in {aside.name}",
                file=sys.stderr,
                flush=True,
            )
        self._keep(rows, run.state.step)

    def on_rewind(self, run: Run) -> None:
        self._keep(list(numbered_rows(self._path, step=int)), run.state.step)

    def _set_aside(self) -> Path:
        """Give the file a second name, `metrics-1.jsonl` or the next free one, under which it stays as it is."""
        for number in itertools.count(1):
            aside = self._path.with_stem(f"{self._path.stem}-{number}")
            if not os.path.lexists(aside):
                break
        shutil.copyfile(self._path, aside)
        return aside

    def _keep(self, rows: list[NumberedRow], last_step: int) -> None:
        with atomic_write(self._path) as stream:
            stream.writelines(row.line + b"\n" for row in rows if row.values["step"] <= last_step)

    def on_save(self, run: Run, report: SaveReport) -> None:
        self.write(
            {
                "step": report.step,
                "save_stall_s": report.stall_s,
                "save_s": report.save_s,
                "save_bytes": report.num_bytes,
            }
        )

    def write(self, row: Row) -> None:
        try:
            with naming(self._path), open(self._path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(_finite(self._of_stage | row), allow_nan=False) + "\n")
        except OSError as error:
            error.add_note("Checkpoints are intact, and the run goes on from the newest one")
            raise


def evaluation_row(evaluation: Evaluation) -> Row:
    """The metrics of an evaluation by their names in files and trackers; `domains` holds those of each, if there are
    several.
    """
    row: Row = {
        "validation_loss": evaluation.loss,
        "bits_per_byte": evaluation.bits_per_byte,
        "validation_tokens": evaluation.num_tokens,
        "validation_bytes": evaluation.num_bytes,
    }
    if evaluation.by_domain:
        row["domains"] = {name: evaluation_row(part) for name, part in evaluation.by_domain.items()}
    return row


def observes_usage(run: Run, step: int) -> bool:
    """Tell whether the use of the memory is observed on this step (counted from 1)."""
    every = run.config.logging.memory_every_steps
    return run.config.model.memory is not None and every > 0 and step > 0 and step % every == 0


def scalars(row: Row, prefix: str = "") -> Iterator[tuple[str, float | int]]:
    """A row's numbers by path, as in `memory/3/singular_values/0/1`, for trackers that know no nesting."""
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(index): part for index, part in enumerate(value)}
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MemoryUsage(Callback):
    """Add to the row how the memory was used, on one step of every so many. All ranks; before the row is written.

    It observes the whole step: all its microbatches on all ranks, in training only. Figures go by block: of two memories
    in one, that in attention, whose rows its tokens name, is not observed.
    """

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
    """Notice memories that drop out, once each while a run is trained; after `MemoryUsage`."""

    def __init__(self, listeners: list[Callback]) -> None:
        self._listeners = listeners
        self._observed: deque[Mapping[str, Mapping[str, Any]]] = deque(maxlen=NUM_OBSERVED)
        self._told: set[tuple[str, int]] = set()

    def on_step(self, run: Run, row: Row) -> None:
        if not observes_usage(run, run.state.step):
            return
        self._observed.append(row["memory"])
        new = [each for each in findings(course(self._observed)) if (each.kind, each.block) not in self._told]
        self._told |= {(each.kind, each.block) for each in new}
        for kind, message in in_words(new).items():
            for listener in self._listeners:
                listener.on_incident(run, Incident(run.state.step, kind, message, now()))


class History(Callback):
    """`history.jsonl`: where the run was started, what was noticed, and where it came to its end or was asked to stop. The
    owner only.

    After the checkpoints, so that an end says that all was saved; a start without one has failed, or goes on. Rows of
    `metrics.jsonl` stay those of an uninterrupted run.
    """

    def on_start(self, run: Run) -> None:
        state = run.state
        write_event(
            run.folder, Start(state.step, state.consumed_tokens, now(), socket.gethostname(), run.groups.world_size)
        )

    def on_incident(self, run: Run, incident: Incident) -> None:
        write_event(run.folder, incident)

    def on_end(self, run: Run) -> None:
        write_event(run.folder, End(run.state.step, run.state.consumed_tokens, now()))


def _loss_in_words(loss: float) -> str:
    return "no target" if math.isnan(loss) else f"loss {loss:.4f}"


class ProgressLine(Callback):
    """Loss, tokens per second and time left, on stderr. Rank 0 only."""

    def on_start(self, run: Run) -> None:
        self._progress = Progress("step", total=run.config.train.num_steps, initial=run.state.step)

    def on_step(self, run: Run, row: Row) -> None:
        self._progress.update(
            1,
            f"{_loss_in_words(row['loss'])} grad {row['grad_norm']:.2f} lr {row['lr']:.2e} "
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


class TensorBoard(RowWriter):
    """Scalars in TensorBoard event files."""

    def on_start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder.tensorboard), purge_step=run.state.step + 1)

    def on_rewind(self, run: Run) -> None:
        self._writer.close()
        self.on_start(run)

    def write(self, row: Row) -> None:
        for name, value in scalars(row):
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def on_end(self, run: Run) -> None:
        self._writer.close()


class WandB(RowWriter):
    """Weights & Biases, online or offline; a run that goes on, or goes back, goes on in the same one.

    Its own count of steps cannot go back, so a row's step is a value like the others, against which all are drawn. Rows
    of steps that are taken again come twice there, and the later one is the run's.
    """

    _run: Any = None

    def on_start(self, run: Run) -> None:
        import wandb

        settings = run.config.logging
        run.folder.logs.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings.wandb_project,
            name=run.config.name,
            dir=str(run.folder.logs),
            mode=settings.wandb_mode,
            config=to_dict(run.config),
            id=_wandb_id(run.folder.wandb_id),
            # Offline it means nothing: `wandb sync --append` joins what has the same id.
            resume="allow" if settings.wandb_mode == "online" else None,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        self._run.log(dict(scalars(row)))

    def on_end(self, run: Run) -> None:
        self._run.finish()

    def on_failure(self, run: Run) -> None:
        # The logged rows are sent off; the run is shown as failed until it goes on.
        if self._run is not None:
            self._run.finish(exit_code=1)


def _wandb_id(path: Path) -> str:
    """The id of a run there, made when it starts for the first time."""
    if not path.exists():
        with atomic_write(path) as stream:
            stream.write(secrets.token_hex(8).encode())
    return path.read_text(encoding="ascii").strip()


class Checkpoints(Callback):
    """Save every so many steps, and at the end, and tell the other callbacks what is complete. All ranks.

    A save that is due waits for the update of tables, before which no checkpoint has all of the run.
    """

    def __init__(self, listeners: list[Callback]) -> None:
        self._listeners = listeners
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
            for listener in self._listeners:
                listener.on_save(run, report)
        run.saver.reports.clear()


def _may_stop(run: Run) -> bool:
    """Ask all ranks whether one was told to stop, unless a stop has to wait for the update of tables. Collective."""
    return run.state.num_waiting == 0 and run.stop.ask(run.groups.device)


class Evaluations(Callback):
    """Evaluate every so many steps, and after the last one, and tell the other callbacks. All ranks.

    Data without held-out documents is not evaluated. An evaluation that a stop passes over is made up for when the run
    goes on.
    """

    def __init__(self, listeners: list[Callback]) -> None:
        self._listeners = listeners

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
        for listener in self._listeners:
            listener.on_evaluation(run, evaluation)


def default_callbacks(run: Run, owner: Owner | None = None) -> list[Callback]:
    """The callbacks that the configuration asks for, on this rank; if it owns the folder, also those that guard it and
    record who trained in it."""
    measuring: list[Callback] = [] if owner is None else [Ownership(owner)]
    if run.config.model.memory is not None and run.config.logging.memory_every_steps:
        measuring.append(MemoryUsage())
    listeners: list[Callback] = []
    if run.groups.is_main:
        listeners += [MetricsFile(), ProgressLine()]
        if run.config.logging.tensorboard:
            listeners.append(TensorBoard())
        if run.config.logging.wandb_mode != "disabled":
            listeners.append(WandB())
    recording: list[Callback] = [] if owner is None else [History()]
    health = health_callbacks(run, [*listeners, *recording])
    if any(isinstance(callback, MemoryUsage) for callback in measuring):
        measuring.append(MemoryWatch([*listeners, *recording]))
    # An evaluation comes after the step's row is written and before its checkpoint, so that a resumed run neither
    # repeats nor misses one.
    return [
        *health.first,
        *measuring,
        *health.before_rows,
        *listeners,
        Evaluations(listeners),
        *health.before_saves,
        Checkpoints([*listeners, *health.first]),
        *recording,
        *health.last,
    ]


@dataclass(frozen=True)
class HealthCallbacks:
    """Callbacks that look after a run's health, by their place among the others."""

    first: list[Callback]
    before_rows: list[Callback]
    before_saves: list[Callback]
    last: list[Callback]


def health_callbacks(run: Run, listeners: list[Callback]) -> HealthCallbacks:
    """Health callbacks that the configuration asks for; `listeners` are told of incidents."""
    rules = run.config.health
    hangs = [Hangs(run)] if hang_limit_s(run.config) else []
    has_others = run.groups.world_size > 1
    return HealthCallbacks(
        first=[*hangs],
        before_rows=[SlowRanks(listeners)] if has_others and rules.slow_ranks.every_steps else [],
        before_saves=[Replicas(listeners)] if has_others and rules.compare_replicas_every_steps else [],
        last=[NextStep(hang) for hang in hangs],
    )
