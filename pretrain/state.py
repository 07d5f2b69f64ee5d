"""State of a run: everything a resume needs besides tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megamem.parameters.trained_part import ALL, Trained


@dataclass(frozen=True)
class DataRead:
    """A data set as it was when a run read it.

    Attributes:
        path: absolute path at which it was.
        sha256: hash of its tokens and their tokenizer (`Manifest.content_fingerprint`).
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class TrainedOn:
    """The data sets of a part of a run.

    Attributes:
        first_step: steps that were done before.
        datasets: data sets in the order of `data.datasets`.
    """

    first_step: int
    datasets: tuple[DataRead, ...]

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> TrainedOn:
        """Make it from the values of a checkpoint's `state.json`."""
        return cls(values["first_step"], tuple(DataRead(**dataset) for dataset in values["datasets"]))

    @property
    def contents(self) -> list[str]:
        """Hashes of the data sets, wherever they were and in whatever order."""
        return sorted(dataset.sha256 for dataset in self.datasets)


@dataclass(frozen=True)
class RunState:
    """Counters of a run. The learning rates, data and random numbers of a step are functions of them and the config.

    Attributes:
        step: optimizer steps done, skipped ones included.
        consumed_samples: the position in the data: sequences seen or passed over, over all ranks.
        consumed_tokens: tokens seen.
        num_updates: steps whose update was applied.
        num_skipped: steps skipped for a non-finite loss or gradient, or for a spike.
        num_skipped_in_row: steps skipped since the last update.
        num_spikes: steps that were judged to be spikes, those included that the run went back from.
        num_rewinds: times that the run went back to a checkpoint.
        passed_over: first sample, and the one after the last, of what was passed over when the run went back.
        recent: loss and gradient norm of the last steps, as many as the rule of spikes looks at; empty without one.
        trained: parts that have been trained, as `num_updates` and the part whenever the latter changed; empty while it
            has been all of the model.
        tables_every: updates of the run per update of its tables (`optimizer.tables_every`), as `num_updates` and the
            number whenever the latter changed; empty while it has been 1.
        tokenizer: fingerprint of the tokenizer of its data; None: a version wrote it that kept none.
        trained_on: data sets, from the step on at which they changed; it begins above 0 where a version wrote the steps
            before that kept none.
        owes_evaluation: an evaluation was due after this step, and passed over because the run was told to stop.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    num_updates: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    num_spikes: int = 0
    num_rewinds: int = 0
    passed_over: tuple[tuple[int, int], ...] = ()
    recent: tuple[tuple[float, float], ...] = ()
    trained: tuple[tuple[int, Trained], ...] = ()
    tables_every: tuple[tuple[int, int], ...] = ()
    tokenizer: str | None = None
    trained_on: tuple[TrainedOn, ...] = ()
    owes_evaluation: bool = False

    def __post_init__(self) -> None:
        # As JSON gives them back, they are lists.
        object.__setattr__(self, "passed_over", tuple((first, end) for first, end in self.passed_over))
        object.__setattr__(self, "recent", tuple((loss, norm) for loss, norm in self.recent))
        object.__setattr__(self, "trained", tuple((first, _trained(part)) for first, part in self.trained))
        object.__setattr__(self, "tables_every", tuple((first, every) for first, every in self.tables_every))
        parts = (part if isinstance(part, TrainedOn) else TrainedOn.from_plain(part) for part in self.trained_on)
        object.__setattr__(self, "trained_on", tuple(parts))

    @property
    def num_finished(self) -> int:
        """Steps of which nothing is left to do."""
        return self.step - self.owes_evaluation

    @property
    def num_passed_over(self) -> int:
        """Samples that were passed over in all."""
        return sum(end - first for first, end in self.passed_over)

    def training(self, part: Trained) -> RunState:
        """The state from which on this part is trained."""
        if part == (self.trained[-1][1] if self.trained else ALL):
            return self
        return replace(self, trained=(*self.trained, (self.num_updates, part)))

    def updating_tables(self, every: int) -> RunState:
        """The state from which on tables are updated with every so many updates of the run."""
        if every == self._tables[1]:
            return self
        return replace(self, tables_every=(*self.tables_every, (self.num_updates, every)))

    @property
    def num_waiting(self) -> int:
        """Updates of the run since the last one of its tables."""
        first, every = self._tables
        return (self.num_updates - first) % every

    @property
    def updates_tables(self) -> bool:
        """True if the next update is one of the tables, too."""
        return self.num_waiting + 1 == self._tables[1]

    @property
    def table_updates(self) -> tuple[bool, bool]:
        """Flags: the next update is one of the tables, too; the one behind it is."""
        return self.updates_tables, replace(self, num_updates=self.num_updates + 1).updates_tables

    @property
    def _tables(self) -> tuple[int, int]:
        """The last entry of `tables_every`."""
        return self.tables_every[-1] if self.tables_every else (0, 1)

    def reading(self, tokenizer: str | None, datasets: tuple[DataRead, ...]) -> RunState:
        """The state from which on these data sets are read, of one tokenizer."""
        last = self.trained_on[-1].datasets if self.trained_on else None
        parts = self.trained_on if datasets == last else (*self.trained_on, TrainedOn(self.step, datasets))
        return replace(self, tokenizer=tokenizer, trained_on=parts)

    def without_moments(self) -> RunState:
        """The state whose moments start at zero, of whatever is trained then."""
        trained = tuple((0, part) for _, part in self.trained[-1:] if part != ALL)
        tables_every = tuple((0, every) for _, every in self.tables_every[-1:] if every > 1)
        return replace(self, num_updates=0, trained=trained, tables_every=tables_every)

    def updates_of(self, is_trained: Callable[[Trained], bool], *, is_table: bool = False) -> int:
        """Updates since a parameter has been trained without a break, which its moments have seen.

        Args:
            is_trained: True if the parameter is trained, given the part that is.
            is_table: the parameter is a memory's table.
        """
        since, before = 0, True
        for first, part in self.trained:
            now = is_trained(part)
            if now and not before:
                since = first
            before = now
        return self._table_updates_since(since) if is_table else self.num_updates - since

    def _table_updates_since(self, since: int) -> int:
        """Updates of tables behind the first `since` updates of the run."""
        parts = [(0, 1), *self.tables_every, (self.num_updates, 1)]
        return sum(
            (end - first) // every - (max(first, since) - first) // every
            for (first, every), (end, _) in pairwise(parts)
            if end > since
        )

    def after_step(
        self,
        *,
        samples: int,
        tokens: int,
        updated: bool,
        spike: bool = False,
        recent: tuple[tuple[float, float], ...] = (),
    ) -> RunState:
        """The state after one more step; `recent` is its own and what is kept of those before it."""
        return replace(
            self,
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            num_updates=self.num_updates + updated,
            num_skipped=self.num_skipped + (not updated),
            num_skipped_in_row=0 if updated else self.num_skipped_in_row + 1,
            num_spikes=self.num_spikes + spike,
            recent=recent,
        )

    def back_at(self, saved: RunState) -> RunState:
        """The state of a run that goes back to a checkpoint, and passes over the samples it has read since then."""
        before = tuple((first, end) for first, end in self.passed_over if end <= saved.consumed_samples)
        back = saved.reading(self.tokenizer, self.trained_on[-1].datasets) if self.trained_on else saved
        return replace(
            back,
            consumed_samples=self.consumed_samples,
            num_spikes=self.num_spikes,
            num_rewinds=self.num_rewinds + 1,
            owes_evaluation=False,
            passed_over=(*before, (saved.consumed_samples, self.consumed_samples)),
        )


def _trained(part: Any) -> Trained:
    """A part from the values of a checkpoint's `state.json`; versions that knew layers alone wrote these."""
    layers, tables_alone = part if part and isinstance(part[-1], bool) else (part, False)
    return Trained(None if layers is None else tuple(layers), tables_alone)
