"""A small search, alike for every model: a few keys, a few values each, and as many trials for one as for the other.

A model starts from its file's own values. Then the keys are gone through in the order of the tuning file, and each
other value of a key is tried with the best of what was found so far; what is better stays. A model that does not have a
key, or not that value of it, has more trials left for the others, which are gone through again from the best. The
validation loss decides, of a run that is shorter than the reported ones, from another seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.studies.compare.key_files import read_keys
from lab.studies.compare.rules import with_seed
from pretrain.config.keys import all_keys, ineffective_fields, nearest_keys
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_inline
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError

_FIELDS = {"trials": int, "steps": int, "seed": int, "keys": dict}


@dataclass(frozen=True)
class Tuning:
    """Trials to make.

    Attributes:
        num_trials: runs per model, the first with its own settings.
        num_steps: steps of each.
        seed: seed of their weights.
        values: values by key, in the order in which they are tried. Several keys joined by commas are set together, and
            each of their values is a list of as many.
    """

    num_trials: int
    num_steps: int
    seed: int
    values: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Trial:
    """One run of a search.

    Attributes:
        changes: values that it sets otherwise than the model's file does, by key.
        config: the model with that, before it is shortened.
        loss: its validation loss, in nats per token.
    """

    changes: Mapping[str, Any]
    config: RunConfig
    loss: float


def read_tuning(path: Path) -> Tuning:
    """Read a tuning file.

    Raises:
        ConfigError: the file is wrong; the message names it, what is wrong and what is expected.
    """
    content = read_keys(path, "--tune", "tuning", _FIELDS)
    for name, kind in _FIELDS.items():
        value = content[name]
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 1):
            expected = "a number of at least 1" if kind is int else "a mapping of keys to lists of values"
            raise ConfigError(f"{path}: {name} is {value!r}, expected {expected}")
    for key, values in content["keys"].items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: {key} is {values!r}, expected a list of the values to try")
        names = _names(key)
        if any(name.split(".")[0] not in ("model", "optimizer") for name in names):
            raise ConfigError(
                f"{path}: {key} cannot be tuned: only keys of model and optimizer can, as all models see the same tokens"
            )
        if len(names) > 1 and not all(isinstance(value, list) and len(value) == len(names) for value in values):
            raise ConfigError(f"{path}: {key} is {values!r}, expected a list of lists, each with {len(names)} values")
    values = {key: tuple(values) for key, values in content["keys"].items()}
    return Tuning(content["trials"], content["steps"], content["seed"], values)


class Search:
    """The search of one model: trials one after the other, and the best of them."""

    def __init__(self, path: str, overrides: list[str], tuning: Tuning) -> None:
        self._path, self._overrides, self._tuning = path, overrides, tuning
        self._own = load_config(path, overrides)
        self.trials: list[Trial] = []

    @property
    def best(self) -> Trial:
        """The trial with the lowest loss, the earlier one of two alike."""
        return min(self.trials, key=lambda trial: trial.loss)

    def run(self, train: Callable[[RunConfig, int], float]) -> None:
        """Try, until the trials are used up or nothing is left.

        Args:
            train: gets a configuration and the number of its trial, from 1, and returns the loss.
        """
        self._try({}, self._own, train)
        before = -1
        while len(self.trials) > before:
            before = len(self.trials)
            for changes, config in self._candidates():
                if len(self.trials) == self._tuning.num_trials:
                    return
                self._try(changes, config, train)

    def _candidates(self) -> Iterator[tuple[Mapping[str, Any], RunConfig]]:
        """Every value of every key that the best of now does not have, and that was not tried beside its other ones."""
        for key, values in self._tuning.values.items():
            for value in values:
                changes = {**self.best.changes, **changes_of(key, value)}
                config = self.config(changes)
                if config is not None and config not in [trial.config for trial in self.trials]:
                    yield changes, config

    def _try(self, changes: Mapping[str, Any], config: RunConfig, train: Callable[[RunConfig, int], float]) -> None:
        self.trials.append(Trial(changes, config, train(self.shortened(config), len(self.trials) + 1)))

    def config(self, changes: Mapping[str, Any]) -> RunConfig | None:
        """The model with these settings; None if it cannot have them."""
        if not all(_has(self._own, key) for key in changes):
            return None
        try:
            return self._load(changes)
        except ConfigError:
            return None

    def problem(self, changes: Mapping[str, Any]) -> str:
        """The reason why the model cannot have these settings, in the loader's words."""
        try:
            self._load(changes)
        except ConfigError as error:
            return str(error)
        return ""

    def _load(self, changes: Mapping[str, Any]) -> RunConfig:
        words = [f"{key}={dump_inline(value)}" for key, value in changes.items()]
        return load_config(self._path, [*self._overrides, *words])

    def reads(self, names: Iterable[str]) -> bool:
        """True if the model, as its file has it, has all of these keys and makes use of them."""
        silent = [item.key for item in ineffective_fields(self._own)]
        return all(
            _has(self._own, name) and not any(f"{name}.".startswith(f"{key}.") for key in silent) for name in names
        )

    def shortened(self, config: RunConfig) -> RunConfig:
        """Configuration as a trial trains it."""
        config = with_seed(config, self._tuning.seed)
        return replace(
            config,
            train=replace(config.train, num_steps=self._tuning.num_steps),
            evaluation=replace(config.evaluation, every_steps=0),
        )


def check_keys(tuning: Tuning, path: Path, searches: Sequence[Search]) -> list[str]:
    """Refuse values that no model can have, which would be passed over without a word.

    A key that only other families read is no mistake: one file is the search of them all.

    Returns:
        Each key that none of these models reads, with its values.

    Raises:
        ConfigError: no model can have a value; the message names the key, the value and what is wrong with it.
    """
    unread = []
    for key, values in tuning.values.items():
        for name in _names(key):
            _check_name(name, path)
        readers = [search for search in searches if search.reads(_names(key))]
        refused = [v for v in values if all(search.config(changes_of(key, v)) is None for search in searches)]
        if refused and readers:
            raise ConfigError(
                f"{path}: no model of the comparison takes {key}={refused[0]}: correct it, or leave it out\n"
                f"{readers[0].problem(changes_of(key, refused[0]))}"
            )
        if refused:
            unread.append(f"{key}={dump_inline(list(refused))}")
    return unread


def _check_name(name: str, path: Path) -> None:
    known = list(all_keys(RunConfig))
    if name not in known:
        nearest = nearest_keys(name, known)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "megamem config show --keys lists them all"
        raise ConfigError(f"{path}: unknown key {name}: {hint}")


def changes_of(key: str, value: Any) -> dict[str, Any]:
    """Settings of a value of a tuning file, by key."""
    names = _names(key)
    return {key: value} if len(names) == 1 else dict(zip(names, value, strict=True))


def _names(key: str) -> list[str]:
    return [name.strip() for name in key.split(",")]


def _has(config: RunConfig, key: str) -> bool:
    """True if a configuration has a key, by its kind of section too; an override would make a section that is not there."""
    *sections, name = key.split(".")
    section: Any = config
    for each in sections:
        section = getattr(section, each, None)
    return section is not None and hasattr(section, name)
