"""Models of finished comparisons: their resources and what they reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lab.studies.compare.runs import read_result
from pretrain.config.stages import load_config
from pretrain.data.manifest import open_saved_tokenizer
from pretrain.errors import ConfigError
from pretrain.planning.counts.formulas import training_flops_per_token
from pretrain.run.folder import RunFolder
from tools.common.vocabulary import with_vocabulary_of

RESOURCES = {"compute": "C, TFLOPs", "rows": "N, rows", "reads": "K, rows read per token"}
"""By the keys of amounts: symbols of the law, units and words."""


@dataclass(frozen=True)
class Point:
    """One model of a comparison.

    Attributes:
        name: name of the model.
        family: its kind of memory, `experts` or `dense`.
        amounts: amounts of compute in a training (TFLOPs), of rows and of rows read per token, by the keys of
            `RESOURCES`.
        loss: mean over seeds of the last validation loss.
        num_seeds: seeds that there are.
    """

    name: str
    family: str
    amounts: dict[str, float]
    loss: float
    num_seeds: int


def read_points(folder: Path) -> list[Point]:
    """The models of a comparison that have a finished run.

    Raises:
        ConfigError: a run's configuration cannot be read.
    """
    points = []
    for model in sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ():
        runs = [RunFolder(path) for path in sorted(model.glob("seed_*"))]
        found = [point for run in runs if (point := _point(model.name, run)) is not None]
        if not found:
            continue
        if len({tuple(point.amounts.items()) for point in found}) > 1:
            raise ConfigError(f"{model} has runs of several models or lengths: give each its own folder")
        points.append(
            Point(found[0].name, found[0].family, found[0].amounts, fmean(each.loss for each in found), len(found))
        )
    return points


def _point(name: str, run: RunFolder) -> Point | None:
    if not run.config.exists():
        return None
    config = load_config(run.config)
    result = read_result(run.metrics, config)
    if result is None:
        return None
    # A run whose model names its vocabulary may have left its tokenizer behind.
    model = (
        config if config.model.vocab_size else with_vocabulary_of(config, open_saved_tokenizer(run.tokenizer))
    ).model
    tokens = config.train.num_steps * config.train.tokens_per_step
    amounts = {"compute": tokens * training_flops_per_token(model, config.train.sequence_length) / 1e12}
    if model.memories:
        amounts["rows"] = float(sum(bank.num_rows for bank in model.memory_plan.banks))
        amounts["reads"] = float(sum(layer.memory.lookup.rows for layer in model.memory_layers))
    family = model.memory_kinds if model.memories or model.moe is None else "experts"
    return Point(name, family, amounts, result.validation_loss, 1)


def largest(points: Sequence[Point]) -> Point:
    """The model with most compute."""
    return max(points, key=lambda point: point.amounts["compute"])
