"""Contents of a report on a run, from its folder: columns of numbers against tokens, and events on the way.

The metrics of a long run do not fit into a page, nor as rows into memory: they are read line by line into columns, and
`binned` makes of a column what a line of a chart can show.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.suggest import did_you_mean_path
from pretrain.data.manifest import open_saved_tokenizer
from pretrain.errors import ConfigError, DataError
from pretrain.planning.counts.formulas import ParameterCounts, count_parameters
from pretrain.run.folder import RunFolder
from pretrain.run.history import Incident, Start, read_history
from pretrain.run.metric_rows import numbered_rows
from pretrain.run.not_a_run import refuse_configuration
from pretrain.train.health.memories import MemoryFault, find_faults
from tools.common.run_status import Standing, standing_of
from tools.common.vocabulary import with_vocabulary_of

STEP_FIGURES = ("loss", "lr", "value_lr", "tokens_per_s", "tflops_per_gpu", "step_s", "grad_norm", "value_grad_norm")
"""Figures in the rows of steps."""
EVALUATION_FIGURES = ("validation_loss", "bits_per_byte")
SAVE_FIGURES = ("save_stall_s", "save_s", "save_bytes")
_OF_BLOCKS = ("memory", "moe")


@dataclass(frozen=True)
class Column:
    """A figure's course: at how many tokens it was how large. Doubles; values that were not finite are left out."""

    tokens: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, tokens: float, value: float) -> None:
        """One more value."""
        self.tokens.append(tokens)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float | None:
        """The newest value; None if there is none."""
        return self.values[-1] if self.values else None


@dataclass(frozen=True)
class Metrics:
    """The rows of a run as columns.

    Attributes:
        step, tokens: step of the last row of a step, and the tokens seen by then.
        figures: columns by their names in the rows.
        of_blocks: columns by name, then by block number: figures of memories and experts. Singular values, by head in
            the rows, are `singular_value_1` and `singular_value_2`: means over the heads of the largest and the second.
        skipped: tokens at the rows by which steps had been skipped, and how many since the row before.
        domains: bits per byte of each domain of the held-out documents, where there are several.
        stages: tokens at which the stages of a run of stages begin, and their names.
    """

    step: int
    tokens: int
    figures: dict[str, Column]
    of_blocks: dict[str, dict[int, Column]]
    skipped: tuple[tuple[float, int], ...]
    domains: dict[str, Column] = field(default_factory=dict)
    stages: tuple[tuple[float, str], ...] = ()

    @property
    def dropped_out(self) -> list[MemoryFault]:
        """The memories whose keys have collapsed, or that are silent, at the end."""
        course: dict[int, dict[str, Sequence[float]]] = {}
        for name, columns in self.of_blocks.items():
            for block, column in columns.items():
                course.setdefault(block, {})[name] = column.values
        return find_faults(course)


@dataclass(frozen=True)
class RunRecord:
    """A run as a report shows it.

    Attributes:
        name: name of the run in the page.
        metrics: its course.
        config: None of a file of rows without a folder, or if this version cannot read it.
        config_problem: reason why this version cannot read the configuration; empty if it can.
        parameters: None without a configuration, or without the tokenizer that says how many ids there are.
        starts: starts of the run, in order; none of a run from before they were recorded.
        incidents: events that were noticed of its health, in order.
        standing: None of a file of rows.
    """

    name: str
    metrics: Metrics
    config: RunConfig | None = None
    config_problem: str = ""
    parameters: ParameterCounts | None = None
    starts: tuple[Start, ...] = ()
    incidents: tuple[Incident, ...] = ()
    standing: Standing | None = None


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Runs, each by the name of its folder or file, or by its whole path where two have one name.

    Raises:
        ConfigError: a path is no run or has no metrics yet, or is named twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"a run is named twice: {', '.join(map(str, paths))}")
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=str(path))
        for path, run in zip(paths, runs, strict=True)
    ]


def read_run(path: Path) -> RunRecord:
    """A run's folder, or a file with the rows of one.

    Raises:
        ConfigError: no such run exists, it has no metrics yet, or they are damaged.
    """
    refuse_configuration(path)
    if path.is_file():
        return RunRecord(path.stem, read_metrics_file(path))
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder{did_you_mean_path(path)} Name a run's folder of `megamem train`, or a metrics.jsonl file"
        )
    folder = RunFolder(path)
    if not folder.metrics.is_file():
        raise ConfigError(
            f"{path} has no {folder.metrics.name}: either it is no folder of `megamem train`, or the run has taken no "
            "step yet"
        )
    metrics = read_metrics_file(folder.metrics)
    record = _with_config(RunRecord(path.resolve().name, metrics), folder)
    num_steps = record.config.run_steps if record.config else None
    events = read_history(folder)
    return replace(
        record,
        starts=tuple(event for event in events if isinstance(event, Start)),
        incidents=tuple(event for event in events if isinstance(event, Incident)),
        standing=standing_of(folder, metrics.step, num_steps),
    )


def _with_config(record: RunRecord, folder: RunFolder) -> RunRecord:
    try:
        config = load_config(folder.config)
    except ConfigError as error:
        return replace(record, config_problem=str(error))
    try:
        sized = with_vocabulary_of(config, open_saved_tokenizer(folder.tokenizer))
    except DataError:
        return replace(record, config=config)
    return replace(record, config=config, parameters=count_parameters(sized.model))


def read_metrics_file(path: Path) -> Metrics:
    """The columns of a file of metrics.

    Raises:
        ConfigError: the file has no row of a step yet, or one whose figures are of another kind.
    """
    figures: dict[str, Column] = {}
    of_blocks: dict[str, dict[int, Column]] = {}
    domains: dict[str, Column] = {}
    skipped: list[tuple[float, int]] = []
    stages: list[tuple[float, str]] = []
    step = tokens = num_skipped = 0
    # A save's row may come some steps after its own, and says its step alone.
    tokens_at: dict[int, float] = {}
    for numbered in numbered_rows(path, step=int):
        row = numbered.values
        try:
            if "loss" in row:
                if (stage := row.get("stage")) is not None and (not stages or stages[-1][1] != stage):
                    stages.append((tokens, stage))
                step, tokens = row["step"], row["consumed_tokens"]
                tokens_at[step] = tokens
                if (now_skipped := row.get("num_skipped", num_skipped)) > num_skipped:
                    skipped.append((tokens, now_skipped - num_skipped))
                    num_skipped = now_skipped
            at = tokens_at.get(row["step"], tokens) if "save_s" in row else tokens
            for name in (*STEP_FIGURES, *EVALUATION_FIGURES, *SAVE_FIGURES):
                if (value := row.get(name)) is not None:
                    figures.setdefault(name, Column()).add(at, value)
            for name, part in row.get("domains", {}).items():
                if (value := part["bits_per_byte"]) is not None:
                    domains.setdefault(name, Column()).add(at, value)
            for name, block, value in _figures_of_blocks(row):
                of_blocks.setdefault(name, {}).setdefault(block, Column()).add(tokens, value)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {numbered.number}, is no row of a run ({error})") from error
    if not step:
        raise ConfigError(f"{path} has no row of a step yet: the run has just started, or never got so far")
    ordered = {name: dict(sorted(columns.items())) for name, columns in of_blocks.items()}
    return Metrics(step, tokens, figures, ordered, tuple(skipped), domains, tuple(stages))


def _figures_of_blocks(row: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    for part in _OF_BLOCKS:
        for block, figures in row.get(part, {}).items():
            for name, value in figures.items():
                if isinstance(value, list):
                    for place in range(min(map(len, value), default=0))[:2]:
                        largest = [of_head[place] for of_head in value]
                        if None not in largest:
                            yield f"singular_value_{place + 1}", int(block), fmean(largest)
                elif value is not None:
                    yield name, int(block), value


@dataclass(frozen=True)
class Binned:
    """A column in equal ranges of tokens; ranges without values are left out. All arrays are [B] float64.

    Attributes:
        tokens, mean: means over each range.
        low, high: the smallest and largest value of each.
    """

    tokens: np.ndarray[Any, Any]
    mean: np.ndarray[Any, Any]
    low: np.ndarray[Any, Any]
    high: np.ndarray[Any, Any]


def binned(column: Column, num_bins: int) -> Binned:
    """At most `num_bins` points of a column: mean, least and most of equal ranges of its tokens.

    Fewer values than that stay as they are.
    """
    tokens, values = (np.frombuffer(part, dtype=np.float64) for part in (column.tokens, column.values))
    if len(values) <= num_bins:
        return Binned(tokens, values, values, values)
    first, span = tokens.min(), float(np.ptp(tokens)) or 1.0
    bins = np.minimum(((tokens - first) / span * num_bins).astype(np.int64), num_bins - 1)
    # The row of a save can stand behind those of later steps.
    order = np.argsort(bins, kind="stable")
    tokens, values = tokens[order], values[order]
    starts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    sizes = np.diff(starts, append=len(values))
    return Binned(
        np.add.reduceat(tokens, starts) / sizes,
        np.add.reduceat(values, starts) / sizes,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
