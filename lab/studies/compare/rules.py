"""Common settings that the models of a comparison must have, and the costs of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from pretrain.config.schema import DatasetEntry, RunConfig
from pretrain.config.source import dump_inline
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token

BASE_FILE = "base.yaml"
"""A file of this name is what others build on, and no model; it may be among those named (`lab/configs/compare/*.yaml`)."""

SAME = (
    "train.num_steps",
    "train.global_batch_size",
    "train.sequence_length",
    "data.datasets",
    "data.seed",
    "data.shuffle",
    "data.documents",
    "evaluation.max_sequences",
)
"""Keys that all models share: which tokens, in which order, sequences and steps, and which are held out."""

TOLERANCE = 0.02
"""Active parameters and FLOPs per token may differ by this much before the report marks them."""


@dataclass(frozen=True)
class ModelFigures:
    """Costs of a model, by the closed formulas."""

    name: str
    total: int
    active: int
    forward_flops_per_token: float
    table_bytes_per_token: int


def load_configs(words: Sequence[str], late_overrides: Sequence[str] = ()) -> dict[str, RunConfig]:
    """The models by the paths of their files, in the order given.

    Args:
        words: paths, and overrides among them.
        late_overrides: more of those.

    Raises:
        ConfigError: no model is given, a file cannot be loaded, or the models are not comparable.
    """
    overrides = overrides_among(words, late_overrides)
    if any(word.startswith("seed=") for word in overrides):
        raise ConfigError("seed is what --seeds sets: use that, or data.seed for another order of the data")
    paths = dict.fromkeys(word for word in words if "=" not in word and Path(word).name != BASE_FILE)
    if not paths:
        raise ConfigError(f"nothing to compare: name at least one CONFIG (files named {BASE_FILE} are left out)")
    configs = {path: load_config(path, overrides) for path in paths}
    for path, config in configs.items():
        if config.stage is not None:
            raise ConfigError(f"{path} has stages, and models are compared on one run each: name a file without them")
    check_comparable(configs)
    return configs


def overrides_among(words: Sequence[str], late_overrides: Sequence[str] = ()) -> list[str]:
    """The overrides of a command line, in their order."""
    return [*(word for word in words if "=" in word), *late_overrides]


def check_comparable(configs: Mapping[str, RunConfig]) -> None:
    """Refuse models that would not see the same tokens.

    Args:
        configs: configurations by the path of their file.

    Raises:
        ConfigError: two models differ in a key or share a name; the message names the key and the values, or the name.
    """
    (reference, first), *others = configs.items()
    for path, config in others:
        for key in SAME:
            expected, found = (c.data_seed if key == "data.seed" else attrgetter(key)(c) for c in (first, config))
            if expected != found:
                raise ConfigError(
                    f"{key} is {_shown(expected)} in {reference} and {_shown(found)} in {path}: models are compared on "
                    f"the same tokens, so set both alike (an override, as in {key}=..., holds for all)"
                )
    paths: dict[str, str] = {}
    for path, config in configs.items():
        if config.name in paths:
            raise ConfigError(
                f"{paths[config.name]} and {path} have the name {config.name}, which names the folder of their runs: "
                "give each its own"
            )
        paths[config.name] = path


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{entry.path} ({_amount(entry)})" for entry in value) or "empty"
    return dump_inline(value)


def _amount(entry: DatasetEntry) -> str:
    return f"weight {entry.weight:g}" if entry.epochs is None else f"{entry.epochs:g} epochs"


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The configuration with a seed for its weights; the order of the data stays what the file alone would give."""
    return replace(config, seed=seed, data=replace(config.data, seed=config.data_seed))


def model_figures(config: RunConfig) -> ModelFigures:
    """The closed formulas' figures of a configuration's model, which has a vocabulary."""
    model = config.model
    assert model.vocab_size is not None
    counts = count_parameters(model)
    return ModelFigures(
        name=config.name,
        total=counts.total,
        active=counts.active,
        forward_flops_per_token=forward_flops_per_token(model, config.train.sequence_length),
        table_bytes_per_token=counts.read_values * config.train.element_bytes,
    )


def inequalities(figures: ModelFigures, reference: ModelFigures) -> dict[str, float]:
    """Departures of a model from the reference, as fractions, where they are more than `TOLERANCE`."""
    departures = {
        "active": figures.active / reference.active - 1,
        "flops": figures.forward_flops_per_token / reference.forward_flops_per_token - 1,
    }
    return {name: value for name, value in departures.items() if abs(value) > TOLERANCE}
