"""Shipped configurations with a Tucker-scored memory put out at initialisation what each choice of `initialisation`
promises.

`paper`: the variance of Eq. 22, which is that of Eq. 25. `matched`: that of the real SwiGLU. `released`: that of Eq. 22
with the public constants. All are measured on layers of the full size, of which only the rows that are read are drawn.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

import pytest
from torch import Tensor

import megamem.initialisation.outputs
import megamem.layers.tucker
from megamem.config.model import ModelConfig
from megamem.initialisation.distributions import Distribution
from megamem.initialisation.initialise import table_std
from megamem.initialisation.outputs import InitialOutput, measure_initial_outputs
from megamem.initialisation.random_fill import fill, normal_rows
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from megamem.retrieval.config import Initialisation, TuckerConfig
from megamem.retrieval.initial import paper_ffn_variance, swiglu_ffn_variance, target_variance
from pretrain.config.stages import load_config
from tests.costly import COSTLY
from tests.rotation import in_rotation

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
CHOICES: tuple[Initialisation, ...] = get_args(Initialisation)
# Tolerance of every variance, and the sampling error of its measurement that must be reached first.
TOLERANCE, STANDARD_ERROR = 0.1, 0.03
LAYERS_PER_SEED, MOST_SEEDS = 2, 12


def tucker_models() -> dict[str, ModelConfig]:
    """The configurations to which the choices apply: product keys have constants of their own, and no `initialisation`."""
    models = {}
    for path in sorted((*CONFIGS.rglob("*.yaml"), *(REPOSITORY / "lab" / "configs").rglob("*.yaml"))):
        # Stages train models of other files (`test_shipped_stages.py`).
        if path.parent.name == "stages":
            continue
        # A file without a name is a part of others.
        if re.search(r"^name:", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            model = load_config(path).model
            # Those in inserted blocks begin with values of zeros: they promise no variance.
            if isinstance(model.memory, TuckerConfig) and not model.memory.is_inserted:
                models[str(path.relative_to(REPOSITORY).with_suffix("")).replace("configs/", "", 1)] = model
    return models


def memory_of(model: ModelConfig) -> TuckerConfig:
    assert isinstance(model.memory, TuckerConfig)
    return model.memory


def measured(
    model: ModelConfig, choices: Sequence[Initialisation], *, seed: int, most_layers: int
) -> dict[Initialisation, list[InitialOutput]]:
    """The layers with each of these initialisations. Tensors that several of them draw alike are drawn once."""
    drawn: dict[Hashable, Tensor] = {}

    def fill_once(out: Tensor, distribution: Distribution, **of: Any) -> None:
        key = (distribution, *of.items(), out.shape)
        if key not in drawn:
            fill(out, distribution, **of)
            drawn[key] = out.detach().clone()
        out.detach().copy_(drawn[key])

    def rows_once(wanted: Tensor, *, std: float, **of: Any) -> Tensor:
        key = (tuple(wanted.tolist()), *of.items())
        if key not in drawn:
            drawn[key] = normal_rows(wanted, std=1.0, **of)
        return drawn[key] * std

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Megatron warns about optional packages.
        warnings.simplefilter("ignore")
        patch.setattr(megamem.initialisation.outputs, "fill", fill_once)
        patch.setattr(megamem.layers.tucker, "fill", fill_once)
        patch.setattr(megamem.initialisation.outputs, "normal_rows", rows_once)
        return {
            choice: measure_initial_outputs(
                replace(model, memory=replace(memory_of(model), initialisation=choice)),
                seed=seed,
                most_layers=most_layers,
            )
            for choice in choices
        }


def what_matters(model: ModelConfig) -> Hashable:
    """All that initial outputs depend on: of sharing only the keys per side, for all rows of all tables are alike."""
    memory = memory_of(model)
    return (
        model.num_layers,
        model.hidden_size,
        model.active_ffn_width,
        model.linear_std,
        model.norm_epsilon,
        {view.num_keys for view in memory.plan(model.num_memory_layers).views}.pop(),
        replace(memory, sharing=SharingConfig(), placement=PlacementConfig()),
    )


MODELS = tucker_models()
# One name for all that are alike.
DISTINCT = {what_matters(model): name for name, model in reversed(MODELS.items())}
NAMES = sorted(DISTINCT.values())
# Sizes are what the others differ in: the ends of every series, but for its largest, which take up to ten times as long.
MEASURED = (
    "ablations/table4_dk344",
    "ablations/table4_dk880",
    "ablations/table5_1to8",
    "lab/compare/rows/rows_00841",
    "lab/compare/ultramem",
    "lab/compare/ultramemv2_block",
    "quickstart",
    "ultramem/227m_1.2b",
    "ultramemv2/1b_7b",
    "ultramemv2/227m_1.2b",
    "ultramemv2/430m_5b",
)
LARGEST = ("ablations/table7_s16_ring", "ultramem/1b_7b", "ultramem/500m_6.8b", "ultramemv2/2.5b_25b")


@dataclass(frozen=True)
class Sample:
    """Layers from the first to the last, with the weights of several seeds.

    Attributes:
        ratios: by choice, each layer's variance over what is promised.
        ffn: the mean variance of the feed-forwards beside them.
    """

    ratios: dict[Initialisation, list[float]]
    ffn: float


def measure(model: ModelConfig) -> Sample:
    """Measure as many seeds as the standard errors of the mean ratios take."""
    outputs: dict[Initialisation, list[InitialOutput]] = {choice: [] for choice in CHOICES}
    for seed in range(1, MOST_SEEDS + 1):
        for choice, found in measured(model, CHOICES, seed=seed, most_layers=LAYERS_PER_SEED).items():
            outputs[choice] += found
        ffn = fmean(output.ffn_std**2 for output in outputs["paper"] if output.ffn_std is not None)
        promised: dict[Initialisation, float] = {"paper": paper_ffn_variance(model), "matched": ffn}
        ratios: dict[Initialisation, list[float]] = {choice: [] for choice in CHOICES}
        for choice, layers in outputs.items():
            for output in layers:
                # Layers of the released constants differ, each by its own cores, and so does what Eq. 22 predicts.
                assert output.predicted_std is not None
                ratios[choice].append(output.measured_std**2 / promised.get(choice, output.predicted_std**2))
        if max(map(standard_error, ratios.values())) <= STANDARD_ERROR:
            return Sample(ratios, ffn)
    raise AssertionError(f"{MOST_SEEDS} seeds leave a standard error above {STANDARD_ERROR}")


def standard_error(values: Sequence[float]) -> float:
    # A single layer says nothing of how others would differ.
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def test_every_kind_of_layer_is_measured() -> None:
    def kinds(names: Sequence[str]) -> set[Hashable]:
        memories = [memory_of(MODELS[name]) for name in names]
        return {(m.kind, m.num_heads, m.key_expansion, getattr(m, "query", None)) for m in memories}

    assert kinds(MEASURED) == kinds(NAMES)


@pytest.mark.parametrize("name", [*in_rotation(MEASURED), *(pytest.param(name, marks=COSTLY) for name in LARGEST)])
def test_outputs_have_the_variance_that_the_choice_promises(name: str, record_property: Any) -> None:
    sample = measure(MODELS[name])
    for choice, ratios in sample.ratios.items():
        record_property(choice, f"{fmean(ratios):.3f} +- {standard_error(ratios):.3f}")
    for choice in CHOICES:
        assert fmean(sample.ratios[choice]) == pytest.approx(1, abs=TOLERANCE), choice
    assert sample.ffn == pytest.approx(swiglu_ffn_variance(MODELS[name]), rel=TOLERANCE)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_do_not_grow_with_depth(name: str, choice: Initialisation) -> None:
    """A block at twice the depth puts out half the variance, as its feed-forward does; the released constants know no
    depth.
    """
    model = MODELS[name]
    memory = replace(memory_of(model), initialisation=choice)
    deep = replace(model, num_layers=2 * model.num_layers)
    if choice == "released":
        assert table_std(deep, memory, []) == table_std(model, memory, [])
    else:
        assert 2 * target_variance(deep, memory) == pytest.approx(target_variance(model, memory))


@pytest.mark.parametrize(
    ("name", "overrides", "mean_score", "output_std"),
    [
        ("ultramemv2/227m_1.2b", ["model.memory.sharing.group=10"], 0.38, 0.0124),
        ("ultramemv2/1b_7b", ["model.memory.num_keys=528", "model.memory.query=single"], 0.21, 0.0189),
    ],
)
def test_released_constants_give_the_releases_outputs(
    name: str, overrides: list[str], mean_score: float, output_std: float
) -> None:
    """Its own code, with its README's sizes, was measured at these figures. Mean scores differ between layers as their
    cores do, and the output is proportional to them."""
    model = load_config(CONFIGS / f"{name}.yaml", overrides).model
    outputs = measured(model, ("paper", "released"), seed=1, most_layers=3)
    released_gain = memory_of(model).key_dim ** -0.4
    per_score = []
    for calibrated, released in zip(outputs["paper"], outputs["released"], strict=True):
        assert calibrated.calibration is not None
        per_score.append(released.measured_std * (calibrated.calibration.gain / released_gain) ** 4)
    # The figures have two digits.
    assert fmean(per_score) == pytest.approx(output_std / mean_score, rel=0.05)
