"""muP: what a few steps change is as large in a wide model as in a narrow one, in every family that has rules; rates are
those of the page's table; layouts agree.

The oracle of the first is the definition (Yang et al., 2022): sizes of coordinates, measured on activations. Parameters are
told apart by their names, which the product never asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_models import export_all, load, some_tokens
from huggingface_models import BASE as HUGGINGFACE
from keys_table import Subject
from tiny_runs import PRIVATE, SHARED, build, joined, on, tiny_run
from torch import Tensor

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.blocks.block import BlockState
from megamem.config.memory import MemoryConfig
from megamem.config.model import LatentAttentionConfig, ModelConfig, MoEConfig, MultiTokenConfig
from megamem.config.width import MupConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.linear_memory.config import LinearConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.ngram_embedding.config import NgramEmbeddingConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.registry import FAMILIES
from megamem.families.residual_ngrams.config import ResidualNgramsConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.families.value_ngrams.config import ValueNgramsConfig
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schedule import group_settings
from pretrain.config.schema import RunConfig, TrainConfig
from tests.rotation import in_rotation, named_in_rotation

BASE = 32
WIDTHS = (32, 128)
MEMORIES: dict[str, Callable[[int], MemoryConfig | None]] = {
    "dense": lambda width: None,
    "ultramem_v2": lambda width: UltraMemV2Config(num_keys=12, key_dim=8, value_dim=16, pre_value_dim=8, top_k=4),
    "ultramem": lambda width: UltraMemConfig(num_keys=12, key_dim=8, value_dim=16, top_k=4),
    "memory_plus": lambda width: MemoryPlusConfig(num_keys=12, key_dim=8, value_dim=16, top_k=4, output_gate=True),
    "pkm": lambda width: PkmConfig(num_keys=12, key_dim=8, value_dim=width, top_k=4),
    "linear_memory": lambda width: LinearConfig(num_rows=64, key_dim=8, value_dim=width, top_k=4),
    "move": lambda width: MoveConfig(value_dim=width, num_gate_heads=width // 8),
    "lave": lambda width: LaveConfig(value_dim=width, num_gate_heads=width // 8),
    "tide": lambda width: TideConfig(value_dim=width),
    "ngram_embedding": lambda width: NgramEmbeddingConfig(
        value_dim=8, address=NgramAddressConfig(max_order=3, num_rows=60)
    ),
    "value_ngrams": lambda width: ValueNgramsConfig(value_dim=8, address=NgramAddressConfig(max_order=3, num_rows=60)),
    "residual_ngrams": lambda width: ResidualNgramsConfig(value_dim=width, address=NgramAddressConfig(num_rows=60)),
    "stem": lambda width: StemConfig(value_dim=2 * width),
    "mome": lambda width: MomeConfig(num_heads=width // 8, value_dim=8),
    "engram": lambda width: EngramConfig(
        value_dim=8, heads_per_order=2, rows_per_head=29, placement=PlacementConfig(blocks=(1,))
    ),
}


STREAMS = {
    "mhc": ResidualStreamsConfig(count=3, iterations=4),
    "single_pass": ResidualStreamsConfig(kind="single_pass", count=3, iterations=4),
    "gated": ResidualStreamsConfig(kind="gated", count=3, rank=12),
    "plain": ResidualStreamsConfig(kind="plain", count=3),
}


def of_width(width: int, kind: str, *, mup: bool = True, streams: str | None = None, **keys: Any) -> RunConfig:
    """A model whose heads, feed-forward and stream are all wider, trained with rates of another order than its size."""
    memory = MEMORIES[kind](width)
    model = ModelConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=width // 8,
        ffn_hidden_size=2 * width,
        vocab_size_multiple=16,
        mup=MupConfig(base_hidden_size=BASE) if mup else None,
        memory=memory,
        residual_streams=None if streams is None else STREAMS[streams],
    )
    optimizer = OptimizerConfig(**({"lr": 0.01, "schedule": "constant", "clip_grad": 0.0} | keys))
    return RunConfig(
        model=model,
        train=TrainConfig(num_steps=8, global_batch_size=16, micro_batch_size=16, sequence_length=16, kernels="torch"),
        optimizer=optimizer,
    )


def changes(config: RunConfig, num_steps: int = 4) -> dict[str, float]:
    """Root mean square of what steps change in the coordinates of blocks, of memories and of logits."""
    with joined(config) as groups:
        subject = Subject(config, groups)
        run = subject.build()
        (model,) = run.bare
        seen: dict[str, Tensor] = {}
        named = [(f"block {i}", layer) for i, layer in enumerate(model.decoder.layers)]
        named += [(f"memory {i}", layer) for i, layer in enumerate(model.memory_layers)]
        for name, module in named:
            module.register_forward_hook(
                lambda _, inputs, out, name=name: seen.update(
                    {name: (out.hidden if isinstance(out, BlockState) else out).detach()}
                )
            )

        def look() -> dict[str, Tensor]:
            seen.clear()
            logits = subject.logits(model)
            return {**seen, "logits": logits - logits.mean(-1, keepdim=True)}

        before = look()
        run.train(num_steps)
        after = look()
    return {name: float((after[name] - x).double().square().mean().sqrt()) for name, x in before.items()}


SMALLEST, LARGEST = 0.4, 2.0
"""Bounds on the change at four times the width over that at one. At rates that do not follow the width, the change of a
hidden matrix's output goes with it, by 4. Logits may fall to 1 / 2: a part of their change is that of a stream which
embeddings have not seen yet, a sum of random terms over m."""


@pytest.mark.parametrize("kind", in_rotation(list(MEMORIES)))
def test_four_times_the_width_changes_as_much(run_ranks: Any, kind: str) -> None:
    def main() -> list[dict[str, float]]:
        return [changes(of_width(width, kind)) for width in WIDTHS]

    (by_width,) = run_ranks(main, 1)
    narrow, wide = by_width
    assert {name: SMALLEST < wide[name] / narrow[name] < LARGEST for name in narrow} == dict.fromkeys(narrow, True)


@pytest.mark.parametrize("streams", in_rotation(list(STREAMS)))
def test_several_streams_change_as_much(run_ranks: Any, streams: str) -> None:
    def main() -> list[dict[str, float]]:
        return [changes(of_width(width, "engram", streams=streams)) for width in WIDTHS]

    (by_width,) = run_ranks(main, 1)
    narrow, wide = by_width
    assert {name: SMALLEST < wide[name] / narrow[name] < LARGEST for name in narrow} == dict.fromkeys(narrow, True)


@pytest.mark.parametrize("kind", in_rotation(["dense", "ultramem_v2"], 2))
def test_without_it_a_wide_model_changes_more(run_ranks: Any, kind: str) -> None:
    (by_width,) = run_ranks(lambda: [changes(of_width(width, kind, mup=False)) for width in WIDTHS], 1)
    narrow, wide = by_width
    assert wide["block 1"] / narrow["block 1"] > 1.5 * LARGEST


@pytest.mark.parametrize("scale", in_rotation(["match_rms_adamw", "original"], 2))
def test_so_does_muon(run_ranks: Any, scale: str) -> None:
    keys = {"matrices": "muon", "muon_scale": scale, "muon_lr_multiplier": 1.0 if scale == "match_rms_adamw" else 4.0}

    def main() -> list[dict[str, float]]:
        return [changes(of_width(width, "ultramem_v2", **keys)) for width in WIDTHS]

    (by_width,) = run_ranks(main, 1)
    narrow, wide = by_width
    assert {name: SMALLEST < wide[name] / narrow[name] < LARGEST for name in narrow} == dict.fromkeys(narrow, True)


RATIO = 2.0
MUP = MupConfig(base_hidden_size=16, base_head_dim=4)
WIDE = replace(SHARED, model=replace(SHARED.model, mup=MUP))
"""Twice as wide as its base, with heads of twice the width."""
OTHERS: dict[str, ModelConfig] = {
    "experts, another token": replace(
        SHARED.model,
        num_query_groups=None,
        mup=MupConfig(base_hidden_size=16),
        latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=4, query_latent_dim=20),
        memory=None,
        ffn_hidden_size=ModelConfig.ffn_hidden_size,
        moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=20),
    ),
    "untied, n-grams, another token": replace(
        SHARED.model,
        mup=MUP,
        tied_embeddings=False,
        multi_token_prediction=MultiTokenConfig(),
        memory=EngramConfig(value_dim=8, heads_per_order=2, rows_per_head=29, placement=PlacementConfig(blocks=(1,))),
    ),
}
for _kind, _streams in STREAMS.items():
    OTHERS[f"streams, {_kind}, another token"] = replace(SHARED.model, mup=MUP, residual_streams=_streams)
SCALED = named_in_rotation({"memory": WIDE.model, **OTHERS})
BY_INPUTS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "projection", "router", "linear_q_down_proj"} | {
    *("linear_kv_down_proj", "linear_q_proj", "query_proj", "pre_value_proj", "gate_proj", "silu_gate", "output_gate"),
    *("fn", "down", "inject", "alpha_map", "beta_map"),
}
"""Weights whose inputs are as wide as the model, by the last part of their names."""
NARROW = {"word_embeddings", "output_layer", "linear_q_up_proj", "linear_kv_up_proj", "value_proj", "key_proj", "up"}


GAINS_LESS_ONE = "decoder.streams_end.norm"
"""Gains before logits of gated streams, of which the parameter is what is more than 1."""


def factor_of(name: str, model: ModelConfig) -> float:
    """Factor of a parameter's rate, as the page's table has it."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in BY_INPUTS | {"final_layernorm"} or name == GAINS_LESS_ONE:
        return 1 / RATIO
    if part == "q_layernorm" and model.latent_attention is None:
        return math.sqrt(1 / 2)
    return math.sqrt(1 / RATIO) if part == "query_gain" else 1.0


@pytest.mark.parametrize("model", SCALED.values(), ids=SCALED)
def test_the_first_step_is_adamw_at_each_parameters_rate(run_ranks: Any, model: ModelConfig) -> None:
    """AdamW with moments from one gradient moves by lr g / (|g| + eps); decays are those of the group, at any rate."""
    optimizer = OptimizerConfig(lr=1e-3, schedule="constant", weight_decay=0.3, clip_grad=0.5)
    config = replace(SHARED, model=model, optimizer=optimizer)

    def main() -> dict[str, tuple[str, Tensor, Tensor, Tensor]]:
        with tiny_run(config) as run:
            (bare,) = run.bare
            before = {name: p.detach().clone() for name, p in bare.named_parameters()}
            run.train(1)
            return {
                name: (p.optimizer_group, before[name], p.detach().clone(), p.main_grad.detach().clone())
                for name, p in bare.named_parameters()
            }

    (parameters,) = run_ranks(main, 1)
    settings = group_settings(0, optimizer, config.train)
    for name, (group, before, after, gradient) in parameters.items():
        lr, decay = settings[group]
        wide = gradient.double()
        step = factor_of(name, model) * lr * wide / (wide.abs() + optimizer.epsilon)
        torch.testing.assert_close(
            after.double(), before.double() * (1 - lr * decay) - step, rtol=1e-5, atol=lr * 1e-4, msg=name
        )


@pytest.mark.parametrize("model", SCALED.values(), ids=SCALED)
def test_initial_weights_have_the_tables_deviations(run_ranks: Any, model: ModelConfig) -> None:
    def main() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with joined(SHARED) as groups:
            found = []
            for mup in (None, model.mup):
                (bare,) = build(replace(SHARED, model=replace(model, mup=mup)), groups).bare
                found.append({name: p.detach().clone() for name, p in bare.named_parameters()})
            return found[0], found[1]

    ((plain, scaled),) = run_ranks(main, 1)
    for name, weight in plain.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        expected = math.sqrt(RATIO) if part in NARROW else 1.0
        if weight.dim() == 1:
            expected = factor_of(name, model)
        if name.startswith("banks."):
            # By Eq. 26 tables follow their value projection; those of n-grams are embeddings.
            ratio = float(scaled[name].double().norm() / weight.double().norm())
            assert ratio == pytest.approx(RATIO**-0.25 if model.memory.kind == "ultramem_v2" else RATIO**0.5), name
        elif name == GAINS_LESS_ONE:
            torch.testing.assert_close(1 + scaled[name], expected * (1 + weight), msg=name)
        else:
            torch.testing.assert_close(scaled[name], expected * weight, rtol=1e-6, atol=1e-7, msg=name)


def test_the_base_itself_is_the_model_without_it_to_the_bit(run_ranks: Any) -> None:
    def main() -> bool:
        found = []
        for mup in (None, MupConfig(base_hidden_size=32, base_head_dim=8)):
            for matrices in ("adamw", "muon"):
                model = replace(SHARED.model, mup=mup)
                config = replace(SHARED, model=model, optimizer=replace(SHARED.optimizer, matrices=matrices))
                with tiny_run(config) as run:
                    history = run.train(2)
                    found.append((history, [p.detach().clone() for p in run.bare[0].parameters()]))
        return all(
            one[0] == other[0] and all(map(torch.equal, one[1], other[1]))
            for one, other in zip(found[:2], found[2:], strict=True)
        )

    assert run_ranks(main, 1) == [True]


UNTIED = replace(PRIVATE, model=replace(PRIVATE.model, mup=MUP))
LAYOUTS: dict[str, tuple[RunConfig, str, dict[str, int]]] = {
    # Muon works on whole matrices, which tensor parallelism cuts.
    "tensor 2 x pipeline 2": (WIDE, "muon", {"tensor": 2, "pipeline": 2}),
    "untied, pipeline 2 x memory 2": (UNTIED, "adamw", {"pipeline": 2, "memory": 2}),
}


@pytest.mark.parametrize("name", in_rotation(list(LAYOUTS), 2))
def test_layouts_train_alike(run_ranks: Any, name: str) -> None:
    """To rounding, in losses and norms: the third step's are those of weights that moved twice."""
    config, matrices, layout = LAYOUTS[name]
    config = replace(config, optimizer=replace(config.optimizer, matrices=matrices))

    def main(config: RunConfig) -> list[tuple[float, float]]:
        with tiny_run(config) as run:
            return run.train(3)

    (alone,) = run_ranks(lambda: main(config), 1)
    for history in run_ranks(lambda: main(on(config, **layout)), 4):
        assert history == [pytest.approx(step, rel=2e-6) for step in alone]


@pytest.mark.usefixtures("remote_code_cache")
def test_an_exported_model_is_the_trained_one(run_ranks: Any, tmp_path: Path) -> None:
    """Factors are in gains, which a folder holds as any other weight."""
    pytest.importorskip("transformers", reason="exported models are loaded with it: pip install '.[hf]'")
    model = replace(HUGGINGFACE, memory=UltraMemV2Config(num_keys=12, key_dim=8, value_dim=16, top_k=6), mup=MUP)
    folder, expected = export_all(run_ranks, tmp_path, {"wide": model})("wide")
    with torch.no_grad():
        torch.testing.assert_close(load(folder)(some_tokens()).logits, expected, rtol=0, atol=1e-5)


def test_only_families_with_rules_have_it() -> None:
    followed = {kind for kind, family in FAMILIES.items() if family.config.follows_width}
    assert followed == MEMORIES.keys() - {"dense"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"memory": None, "qk_norm": False}, "base_head_dim is 4, .* model.qk_norm is false: leave it out"),
        (
            {"memory": None, "num_query_groups": None, "latent_attention": LatentAttentionConfig(12, 4)},
            "base_head_dim is 4, .* model.latent_attention is set: leave it out",
        ),
        (
            {"memory": FAMILIES["peer"].config(num_keys=12, value_dim=32, top_k=4)},
            "memory.kind is peer, for which there",
        ),
        (
            {"memory": MomeConfig(num_heads=2, value_dim=8, router_input="value")},
            "base_head_dim is 4, but model.memory, of kind mome, has weights made of heads, and no rule for wider ones",
        ),
    ],
)
def test_parts_without_a_rule_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.(mup\.)?{message}"):
        replace(WIDE.model, **keys)
