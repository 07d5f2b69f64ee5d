"""Gradients of tables that a run can have (`optimizer.table_gradients`), and what `auto` takes.

What a step reads is known from the configuration: so the choice is made once, before ranks start, and said. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pretrain.config.schedule import largest_table_lr, table_decay
from pretrain.config.schema import RunConfig

MOST_READS = 0.5
"""Reads of a step per row of the tables, up to which `auto` takes rows. A read takes some 50 bytes while reads are sorted, and
each row that was read 4 bytes per column; a dense gradient takes those of every row. Below one read for two rows both memory
and time are less for every width of 13 or more."""


@dataclass(frozen=True)
class Choice:
    """Answer to `auto`.

    Attributes:
        taken: the gradients.
        reason: words on why.
    """

    taken: Literal["dense", "rows"]
    reason: str

    @property
    def text(self) -> str:
        """The choice in a line."""
        return f"optimizer.table_gradients (auto): {self.taken}: {self.reason}"


def chosen(config: RunConfig) -> Choice | None:
    """The choice of `auto`; None where nothing is left to choose."""
    optimizer, model = config.optimizer, config.model
    if model.memory is None or optimizer.tables != "row_wise" or optimizer.table_gradients != "auto":
        return None
    if optimizer.row_clock == "reads":
        return Choice("rows", "optimizer.row_clock is reads")
    if optimizer.trained_rows is not None:
        return Choice("rows", "optimizer.trained_rows is set")
    for why, _ in impossible(config):
        return Choice("dense", why)
    num_rows = sum(bank.num_rows for bank in model.memory_plan.banks)
    if not num_rows:
        return Choice("dense", "without model.vocab_size nobody knows how many rows tables of token ids have")
    reads = config.train.tokens_per_step * sum(layer.memory.lookup.rows for layer in model.memory_layers)
    ratio = reads / num_rows
    counted = f"a step reads {reads:,} times from {num_rows:,} rows, {ratio:.3g} times each"
    if ratio <= MOST_READS:
        return Choice("rows", f"{counted}, and rows are worth it up to {MOST_READS:g}")
    return Choice("dense", f"{counted}, and rows are worth it up to {MOST_READS:g} alone")


def with_chosen_gradients(config: RunConfig) -> RunConfig:
    """The configuration with what `auto` takes in its place; see `chosen`."""
    choice = chosen(config)
    if choice is None:
        return config
    # Sums of rows are in fp32.
    dtype = config.optimizer.table_gradient_dtype if choice.taken == "dense" else "fp32"
    optimizer = replace(config.optimizer, table_gradients=choice.taken, table_gradient_dtype=dtype)
    return replace(config, optimizer=optimizer)


def impossible(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Reasons for which tables cannot have gradients of rows, each with what to set: it takes
    gradients that our kernels make, and a decay that leaves something."""
    optimizer = config.optimizer
    decay, rate = table_decay(optimizer), largest_table_lr(optimizer)
    if optimizer.row_clock == "reads":
        if decay >= 1:
            yield (
                f"the tables' weight decay is {decay:g}, of which optimizer.row_clock reads takes all whatever the learning rate, "
                "so that an update would leave nothing of a row",
                "set optimizer.value_weight_decay below 1 (0.001 as published)",
            )
    elif decay * rate >= 1:
        yield (
            f"the tables' weight decay {decay:g} times their learning rate {rate:g} is 1 or more, so that a step could leave "
            "nothing of rows",
            f"set optimizer.value_weight_decay below {1 / rate:g}",
        )
    for section, memory in config.model.families.items():
        shared = any(bank.on_every_stage for bank in config.model.banks_of(memory))
        if shared and memory.chooses_among_rows and config.parallel.pipeline > 1:
            yield (
                f"{section}.kind is {memory.kind}, whose layers choose other rows on every stage of one table that all stages "
                f"of parallel.pipeline {config.parallel.pipeline} hold",
                "give each layer a table, or use one stage",
            )
    if config.train.kernels == "naive":
        yield ("train.kernels is naive, whose gradients PyTorch makes, of all rows", "use train.kernels: auto")


def gradients_problems(config: RunConfig) -> Iterator[str]:
    """Gradients of rows that were asked for and that tables cannot have, in sentences."""
    optimizer = config.optimizer
    by_reads = optimizer.row_clock == "reads"
    if config.model.memory is None or optimizer.tables != "row_wise":
        return
    if by_reads and optimizer.table_gradients == "dense":
        yield (
            "optimizer.row_clock is reads, and dense gradients do not tell which rows a step has read: set "
            "optimizer.table_gradients: rows"
        )
    elif by_reads or optimizer.table_gradients == "rows":
        asked, instead = (
            ("row_clock is reads", "row_clock: updates")
            if by_reads
            else ("table_gradients is rows", "table_gradients: dense")
        )
        for why, fix in impossible(config):
            yield f"optimizer.{asked}, and {why}: {fix}, or use optimizer.{instead}"
