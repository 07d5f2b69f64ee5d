"""Hidden matrices that Muon updates move as torch.optim.Muon moves them, and on every layout as on one rank.

Layouts of whole runs, checkpoints of other layouts and the effects of keys are tested where those of AdamW are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hidden_matrices import matrices_in
from test_checkpoint_layouts import read_all
from test_moe import EXPERTS
from tiny_runs import PRIVATE, SHARED, TinyRun, on, tiny_run
from torch import Tensor, nn

from megamem.config.model import LatentAttentionConfig
from megamem.config.width import MupConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.stem.config import StemConfig
from megamem.parameters.declaration import matrices_of
from megamem.placement.spans import PlacementConfig
from pretrain.checkpoint.folder import read_state
from pretrain.checkpoint.run_entries import restore_run
from pretrain.config.schema import RunConfig
from pretrain.engine import muon
from pretrain.errors import CheckpointError
from tests.rotation import in_rotation

HAS_ORACLE = hasattr(torch.optim, "Muon")
NEEDS_ORACLE = pytest.mark.skipif(not HAS_ORACLE, reason=f"torch {torch.__version__} has no torch.optim.Muon")
LR, DECAY, MULTIPLIER = 0.01, 0.3, 2.0


def by_muon(config: RunConfig, precision: Literal["fp32", "bf16"] = "bf16", **keys: Any) -> RunConfig:
    optimizer = replace(config.optimizer, matrices="muon", **keys)
    return replace(config, optimizer=optimizer, train=replace(config.train, precision=precision))


BESIDE_EXPERTS = replace(SHARED, model=replace(SHARED.model, moe=EXPERTS))
# Wider heads together than the model: updates of queries have another scale than those of keys and values.
WIDE = replace(SHARED, model=replace(SHARED.model, head_dim=16))
NGRAMS = replace(
    SHARED,
    model=replace(
        SHARED.model,
        memory=EngramConfig(value_dim=8, heads_per_order=2, rows_per_head=29, placement=PlacementConfig(blocks=(1,))),
    ),
)

LATENTS = replace(
    SHARED,
    model=replace(
        SHARED.model,
        num_query_groups=None,
        latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=4, query_latent_dim=20),
    ),
)
MIDUS = MidusConfig(num_heads=4, num_keys=12, value_dim=16, placement=PlacementConfig(blocks=(1, 3)))
UP_PROJECTIONS = replace(
    PRIVATE,
    model=replace(PRIVATE.model, memory=StemConfig(value_dim=24, placement=PlacementConfig(blocks=(1, 3)))),
)
HEADS = replace(PRIVATE, model=replace(PRIVATE.model, memory=MIDUS))
ALL_KEYS = {"muon_scale": "original", "muon_nesterov": False, "muon_momentum": 0.8, "muon_ns_steps": 3}


def step_of_oracle(
    name: str, before: Tensor, gradients: list[Tensor], config: RunConfig, factor: float = 1.0
) -> Tensor:
    """A parameter behind as many updates of torch.optim.Muon as there are gradients, matrix by matrix, each of which is
    `factor` times as large."""
    keys = config.optimizer
    after = before.clone()
    views = matrices_in(name, after, config.model)
    matrices = [nn.Parameter(view.reshape(-1, view.shape[-1]).clone()) for view in views]
    optimizer = torch.optim.Muon(
        matrices,
        lr=LR * MULTIPLIER * factor,
        weight_decay=DECAY,
        momentum=keys.muon_momentum,
        nesterov=keys.muon_nesterov,
        ns_steps=keys.muon_ns_steps,
        adjust_lr_fn=keys.muon_scale,
    )
    for gradient in gradients:
        for matrix, of_matrix in zip(matrices, matrices_in(name, gradient, config.model), strict=True):
            matrix.grad = of_matrix.reshape(matrix.shape).clone()
        optimizer.step()
    for view, matrix in zip(views, matrices, strict=True):
        view.copy_(matrix.detach().view(view.shape))
    return after


BACKBONE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@NEEDS_ORACLE
@pytest.mark.parametrize(("scale", "factor"), [("original", 1.0), ("match_rms_adamw", 8**-0.5)])
def test_updates_follow_the_width_as_the_page_says(run_ranks: Any, scale: str, factor: float) -> None:
    """Matrices of attention and feed-forward, of which both sides grow: eight times the base's."""
    model = replace(SHARED.model, mup=MupConfig(base_hidden_size=SHARED.model.hidden_size // 8, base_head_dim=4))
    keys: dict[str, Any] = {"muon_scale": scale, "muon_lr_multiplier": MULTIPLIER, "muon_weight_decay": DECAY}
    config = by_muon(replace(SHARED, model=model), "fp32", **keys)
    config = replace(config, optimizer=replace(config.optimizer, lr=LR, warmup_steps=0, schedule="constant"))

    def main() -> dict[str, float]:
        with tiny_run(config) as run:
            (bare,) = run.bare
            weights = {name: p for name, p in bare.named_parameters() if any(part in name for part in BACKBONE)}
            before = {name: weight.detach().clone() for name, weight in weights.items()}
            run.train(1)
            found = {}
            for name, weight in weights.items():
                decayed = before[name] * (1 - LR * MULTIPLIER * DECAY)
                by_torch = step_of_oracle(name, before[name], [weight.main_grad], config, factor)
                # It decays by the rate with the factor, and a model by the rate without.
                by_torch += before[name] * LR * MULTIPLIER * DECAY * (factor - 1)
                found[name] = float((weight - by_torch).norm() / (by_torch - decayed).norm())
            return found

    (found,) = run_ranks(main, 1)
    assert len(found) == 4 * SHARED.model.num_layers
    # torch multiplies in bf16.
    assert max(found.values()) < 0.05, found


@NEEDS_ORACLE
@pytest.mark.parametrize(
    ("config", "keys"),
    in_rotation(
        [
            pytest.param(WIDE, {}, id="wide heads"),
            pytest.param(BESIDE_EXPERTS, ALL_KEYS, id="experts, all keys"),
            pytest.param(NGRAMS, {}, id="n-grams"),
            pytest.param(LATENTS, {}, id="latents"),
            pytest.param(HEADS, {}, id="heads' own matrices"),
            pytest.param(UP_PROJECTIONS, {}, id="up-projections"),
        ],
        2,
    ),
)
def test_one_rank_steps_as_torch_does(run_ranks: Any, config: RunConfig, keys: dict[str, Any]) -> None:
    """To the bit, in bf16 with fp32 main weights and fp32 momentum."""
    config = by_muon(config, muon_lr_multiplier=MULTIPLIER, muon_weight_decay=DECAY, **keys)
    config = replace(config, optimizer=replace(config.optimizer, lr=LR, warmup_steps=0, schedule="constant"))

    def main() -> tuple[list[str], list[str]]:
        with tiny_run(config) as run:
            (bare,) = run.bare
            names = {parameter: name for name, parameter in bare.named_parameters()}

            def main_weights() -> dict[str, Tensor]:
                parts = run.optimizer.chained_optimizers
                every = (pair for part in parts for pair in part.main_weights())
                return {
                    names[p]: w.detach().clone().view(p.shape)
                    for p, w in every
                    if matrices_in(names[p], p, config.model)
                }

            before, gradients = main_weights(), dict[str, list[Tensor]]()
            for _ in range(3):
                run.train(1)
                for parameter, name in names.items():
                    gradients.setdefault(name, []).append(parameter.main_grad.clone())
            declared = {name for parameter, name in names.items() if matrices_of(parameter) is not None}
            assert declared == before.keys()
            after = main_weights()
            different = [
                name
                for name, weight in before.items()
                if not torch.equal(after[name], step_of_oracle(name, weight, gradients[name], config))
                or not torch.equal(dict(bare.named_parameters())[name], after[name].bfloat16())
            ]
            return different, [name for name in before if torch.equal(before[name], after[name])]

    ((different, still),) = run_ranks(main, 1)
    assert not different
    assert not still


MODELS = {
    "experts and memories": BESIDE_EXPERTS,
    # Parts of one matrix of queries, and of a key and a value of another scale, are on either tensor-parallel rank.
    "wide heads of one group": replace(WIDE, model=replace(WIDE.model, num_query_groups=1)),
    "heads' own matrices": HEADS,
    "up-projections": UP_PROJECTIONS,
    "latents": LATENTS,
}
# One has both kinds of tables beside matrices, and the other matrices of rows that a table is read for.
WITH_TABLES = ("experts and memories", "up-projections")
LAYOUTS: dict[str, dict[str, int]] = {"tensor 2 x data 2": {"tensor": 2}, "context 2 x data 2": {"context": 2}}
OF_TABLES = {"tensor 2 x memory 4": {"tensor": 2, "memory": 4}, "pipeline 2 x memory 2": {"pipeline": 2, "memory": 2}}
# Whole every week: each pair divides matrices of other shapes in its own way.
PAIRS = [(name, layout) for name in MODELS for layout in LAYOUTS] + [
    (name, layout) for name in WITH_TABLES for layout in OF_TABLES
]


def planted(shape: tuple[int, ...], step: int, key: str) -> Tensor:
    """A whole parameter's gradient: multiples of 2^-8, whose averages by halves are exact."""
    generator = torch.Generator().manual_seed(step + sum(map(ord, key)))
    return torch.randint(-8, 9, shape, generator=generator) * 2.0**-8


def update(run: TinyRun, step: int) -> None:
    """One update, with planted gradients."""
    run.update(lambda key, shape: planted(shape, step, key), lr=LR, weight_decay=DECAY)


def updated(config: RunConfig, folder: Path) -> None:
    with tiny_run(config) as run:
        for step in range(2):
            update(run, step)
        run.save(folder)


def test_every_layout_has_the_bits_of_one_rank(run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix is worked on whole, on one rank, whoever owns parts of it; gradients are equal. In several rounds."""
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 1000)
    names = list(dict.fromkeys(name for name, _ in PAIRS))

    def main(pairs: list[tuple[str, str]]) -> None:
        for name, layout in pairs:
            config = by_muon(MODELS[name], "fp32", muon_momentum=0.5)
            axes = {"one": {}, **LAYOUTS, **OF_TABLES}[layout]
            updated(on(config, micro_batch_size=2, **axes), tmp_path / name / layout)

    run_ranks(lambda: main([(name, "one") for name in names]), 1)
    run_ranks(lambda: main(PAIRS), 4, timeout_s=300)
    for name in names:
        one, *others = sorted((tmp_path / name).iterdir(), key=lambda folder: folder.name != "one")
        expected = read_all(one / "step_00000000")
        momenta = [key for key in expected if key.startswith("optimizer.state.momentum.")]
        assert momenta
        for folder in others:
            actual = read_all(folder / "step_00000000")
            assert actual.keys() == expected.keys()
            weights = [key.replace(".momentum.", ".param.", 1) for key in momenta]
            assert not [key for key in momenta + weights if not torch.equal(actual[key], expected[key])], folder


def test_a_checkpoint_of_the_other_update_is_refused(run_ranks: Any, tmp_path: Path) -> None:
    """On both ways, and read where all moments start anew."""
    muon, adamw = by_muon(SHARED, "fp32"), SHARED

    def main() -> list[str]:
        refusals = []
        for name, config, other in (("muon", muon, adamw), ("adamw", adamw, muon)):
            with tiny_run(config) as run:
                run.train(1)
                path = run.save(tmp_path / name)
            with tiny_run(other) as run:
                with pytest.raises(CheckpointError) as refused:
                    run.resume(path)
                refusals.append(str(refused.value))
                restore_run(read_state(path), run.chunks, run.optimizer, with_moments=False)
        return refusals

    for refusals in run_ranks(main, 2):
        for refusal, (theirs, ours) in zip(refusals, (("muon", "adamw"), ("adamw", "muon")), strict=True):
            for part in (f"optimizer.matrices is {ours}", f"set it to {theirs}", "optimizer_state: reset"):
                assert part in refusal
