"""Blocks of head-wise memory in whole models: stacks against recorded ones, and the same training on every layout.

Legend: b sequences, s tokens, D hidden size, g key/value heads, V columns of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.attention.rotary import rotary_turns
from megamem.chunk.inputs import Inputs
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.linear_memory.config import LinearConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.placement.spans import PlacementConfig
from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.engine.build import build_chunks
from tests.distributed.test_skip_insertion import rope_frequencies
from tests.distributed.test_token_layouts import Trained, place_of
from tests.distributed.test_token_layouts import train as train_and_tell
from tests.distributed.tiny_runs import SHARED, VOCAB_SIZE, answers_without_a_token, on, tiny_run
from tests.golden import read_case
from tests.rotation import in_rotation

STACKS = ("midus_stack_distributed", "midus_stack_top_heavy")
# Megatron's attention and norms add up in fp32 orders of their own.
STACK_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def stack_config(recorded: dict[str, Any]) -> tuple[RunConfig, list[str]]:
    """The model of a recorded stack, and what each of its blocks is called there."""
    order: list[str] = recorded["order"]
    inserted = tuple(number for number, name in enumerate(order) if name.startswith("M"))
    memory = MidusConfig(
        num_heads=recorded["H"],
        num_keys=recorded["n"],
        top_k=recorded["k"],
        value_dim=recorded["r"],
        placement=PlacementConfig(blocks=inserted),
    )
    model = ModelConfig(
        num_layers=len(order),
        hidden_size=recorded["d"],
        num_attention_heads=recorded["H"],
        num_query_groups=recorded["Hkv"],
        ffn_hidden_size=recorded["ffn"],
        rotary_base=int(recorded["rope_theta"]),
        qk_norm=False,
        memory=memory,
    )
    names = [f"{'mem' if name.startswith('M') else 'base'}.{name[1:]}." for name in order]
    return RunConfig(model=model, train=TrainConfig(sequence_length=recorded["seq"])), names


def in_our_layout(tensors: dict[str, Tensor], prefix: str, groups: int) -> dict[str, Tensor]:
    """The recorded tensors of one block under our names in it."""
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    by_group = [own[name].T.unflatten(0, (groups, -1)) for name in ("WQ", "WK", "WV")]
    found = {
        "input_layernorm.weight": own["attn_norm"],
        "self_attention.linear_qkv.weight": torch.cat(by_group, 1).flatten(0, 1),
    }
    if "Wh" in own:
        memory = "self_attention.core_attention.memory."
        found[f"{memory}keys"] = torch.stack((own["keys_row"], own["keys_col"]), 1)
        return {**found, f"{memory}expansion": own["Wh"]}
    return {
        **found,
        "self_attention.linear_proj.weight": own["WO"].T,
        "pre_mlp_layernorm.weight": own["ffn_norm"],
        "mlp.linear_fc1.weight": torch.cat((own["Wgate"].T, own["Wup"].T)),
        "mlp.linear_fc2.weight": own["Wdown"].T,
    }


def errors_of_stack(golden_dir: Path, case: str, dtype: torch.dtype) -> dict[str, float]:
    """Largest errors of the residual stream and of every gradient, over the largest element of the reference."""
    recorded, tensors = read_case(golden_dir / "head", case)
    config, names = stack_config(recorded)
    with cuda_on_cpu():
        groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
        (model,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=dtype)
        # Megatron computes them in fp32 whatever the model's dtype.
        model.rotary_pos_emb.inv_freq = rope_frequencies(config.model)
        parameters, expected = dict(model.named_parameters()), {}
        weights = {name.removeprefix("param."): tensor for name, tensor in tensors.items() if name.startswith("param.")}
        gradients = {name.removeprefix("grad."): tensor for name, tensor in tensors.items() if name.startswith("grad.")}
        with torch.no_grad():
            for block, prefix in enumerate(names):
                for ours, weight in in_our_layout(weights, prefix, recorded["Hkv"]).items():
                    parameters[f"decoder.layers.{block}.{ours}"].copy_(weight)
                for ours, gradient in in_our_layout(gradients, prefix, recorded["Hkv"]).items():
                    expected[f"decoder.layers.{block}.{ours}"] = gradient
            memories = [prefix for prefix in names if prefix.startswith("mem")]
            for bank, prefix in enumerate(memories):
                parameters[f"banks.{bank}.values"].copy_(weights[f"{prefix}Vbar"])
                expected[f"banks.{bank}.values"] = gradients[f"{prefix}Vbar"]
        x = weights["x"].to(dtype).requires_grad_()
        streams = []
        for layer in model.decoder.layers:
            layer.register_forward_hook(lambda module, arguments, out: streams.append(out.hidden))
        model.decoder(x.transpose(0, 1), Inputs(None, turns=rotary_turns(model.rotary_pos_emb(recorded["seq"]))))
        (streams[-1].transpose(0, 1) * tensors["r"].to(dtype)).sum().backward()
        assert x.grad is not None
        results = {f"h{i}": (stream.transpose(0, 1), tensors[f"mid.h{i}"]) for i, stream in enumerate(streams)}
        results["x"] = (x.grad, gradients["x"])
        for name, gradient in expected.items():
            results[name] = (parameters[name].grad, gradient)
        assert {name for name, p in parameters.items() if p.grad is not None} == set(expected)
    return {name: float((a.double() - r).abs().max() / r.abs().max()) for name, (a, r) in results.items()}


@pytest.mark.parametrize("dtype", list(STACK_TOLERANCE), ids=str)
@pytest.mark.parametrize("case", STACKS)
def test_a_model_with_inserted_blocks_computes_what_is_recorded(
    run_ranks: Any, golden_dir: Path, case: str, dtype: torch.dtype
) -> None:
    """The stack agrees after every block, with grouped queries and rotary positions, and in all gradients."""
    (errors,) = run_ranks(lambda: errors_of_stack(golden_dir, case, dtype), 1)
    assert max(errors.values()) <= STACK_TOLERANCE[dtype], errors


MEMORY = MidusConfig(num_heads=4, num_keys=8, top_k=4, value_dim=16, placement=PlacementConfig(blocks=(0, 3, 5)))
CONFIG = replace(SHARED, model=replace(SHARED.model, num_layers=6, memory=MEMORY))
# Tolerance of a weight, against its tensor's largest element on one rank.
TOLERANCE = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 4": {"micro_batch_size": 2},
    "tensor 2": {"tensor": 2},
    "tensor 4 x memory 4": {"tensor": 4, "memory": 4, "query_groups": 4},
    "tensor 2 x memory 2": {"tensor": 2, "memory": 2},
    "tensor 2 x memory 4, selectively recomputed": {"tensor": 2, "memory": 4, "recompute": "selective"},
    "context 2 x memory 2": {"context": 2, "memory": 2},
    "context 2 x tensor 2": {"context": 2, "tensor": 2},
    "pipeline 2 x memory 2": {"pipeline": 2, "memory": 2, "micro_batch_size": 2},
    "pipeline 2 x virtual 3, recomputed": {
        "pipeline": 2,
        "virtual_pipeline": 3,
        "micro_batch_size": 2,
        "recompute": "full",
    },
    "tensor 2 x pipeline 2 x memory 2, recomputed": {
        "tensor": 2,
        "pipeline": 2,
        "memory": 2,
        "recompute": "full",
    },
}
OF_SHARE = in_rotation(list(LAYOUTS))


def laid_out(sizes: dict[str, Any]) -> RunConfig:
    sizes = dict(sizes)
    groups = sizes.pop("query_groups", CONFIG.model.num_query_groups)
    return on(replace(CONFIG, model=replace(CONFIG.model, num_query_groups=groups)), **sizes)


def with_values(patch: pytest.MonkeyPatch) -> None:
    """Tables that are not zero at first, so that keys and attention learn from the first step on."""
    patch.setattr("megamem.initialisation.initialise.table_std", lambda model, memory, sigma_s: 0.5)


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[str, list[Trained]]:
    """Results of every rank, by layout."""

    def main(layouts: dict[str, dict[str, Any]]) -> dict[str, Trained]:
        found = {}
        with pytest.MonkeyPatch.context() as patch:
            with_values(patch)
            for name, sizes in layouts.items():
                with tiny_run(laid_out(sizes)) as run:
                    found[name] = train_and_tell(run)
        return found

    alone: dict[str, dict[str, Any]] = {"one rank": {}, "one rank, 4 key/value heads": {"query_groups": 4}}
    of_share = {name: LAYOUTS[name] for name in OF_SHARE}
    by_rank = [*run_ranks(lambda: main(alone), 1), *run_ranks(lambda: main(of_share), 4, timeout_s=300)]
    return {name: [each[name] for each in by_rank if name in each] for each in by_rank for name in each}


@pytest.mark.parametrize("layout", OF_SHARE)
def test_steps_are_the_same_on_every_layout(trained: dict[str, list[Trained]], layout: str) -> None:
    """Losses, norms, and all weights after the steps: keys and expansions follow their heads."""
    (alone,) = trained["one rank, 4 key/value heads" if "query_groups" in LAYOUTS[layout] else "one rank"]
    assert_alike(trained[layout], alone)


def assert_alike(ranks: list[Trained], alone: Trained) -> None:
    """Assert that four ranks have the losses, norms and weights of one."""
    assert len(ranks) == 4
    for (loss, norm), (expected_loss, expected_norm) in zip(ranks[0].steps, alone.steps, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    expected = alone.whole_weights
    seen: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for name, offset, _, weight in (shard for rank in ranks for shard in rank.weights):
        error = (weight - expected[name][place_of(offset, weight)]).abs().max() / expected[name].abs().max()
        assert error <= TOLERANCE, name
        assert torch.equal(seen.setdefault((name, offset), weight), weight), f"copies of {name} differ"
    assert {name for name, _ in seen} == set(expected)


INSERTED: Any = {"placement": PlacementConfig(blocks=(0, 3, 5), position="inserted"), "top_k": 4}
OTHERS: dict[str, MemoryConfig] = {
    "pkm": PkmConfig(num_heads=4, num_keys=8, key_dim=4, value_dim=32, query_norm=False, **INSERTED),
    "ultramem": UltraMemConfig(
        num_heads=4, queries_per_head=True, num_keys=8, key_dim=4, value_dim=16, initialisation="released", **INSERTED
    ),
    "linear": LinearConfig(num_heads=4, num_rows=40, key_dim=8, value_dim=32, **INSERTED),
    "projected": replace(MEMORY, query_from="projected"),
    "stream and heads, layer norm": replace(
        MEMORY, query_from="stream_and_heads", placement=replace(MEMORY.placement, norm="layer")
    ),
}
FEW = ("tensor 2 x pipeline 2 x memory 2, recomputed", "context 2 x tensor 2")
# Kinds of another family meet both; queries and norms are heads', which tensor-parallel ranks share.
PAIRS = in_rotation(
    [(name, layout) for name, memory in OTHERS.items() for layout in (FEW[1:] if memory.kind == MEMORY.kind else FEW)]
)


@pytest.fixture(scope="module")
def others_trained(run_ranks: Any) -> dict[tuple[str, str], list[Trained]]:
    """Results of every rank, by memory and layout."""

    def main(pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Trained]:
        found = {}
        with pytest.MonkeyPatch.context() as patch:
            with_values(patch)
            for name, layout in pairs:
                config = laid_out(LAYOUTS.get(layout, {}))
                with tiny_run(replace(config, model=replace(config.model, memory=OTHERS[name]))) as run:
                    found[name, layout] = train_and_tell(run)
        return found

    by_rank = run_ranks(lambda: main(PAIRS), 4, timeout_s=300)
    (alone,) = run_ranks(lambda: main(sorted({(name, "one rank") for name, _ in PAIRS})), 1)
    return {
        **{pair: [of_rank[pair] for of_rank in by_rank] for pair in PAIRS},
        **{pair: [trained] for pair, trained in alone.items()},
    }


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_other_inserted_memories_train_the_same_on_every_layout(
    others_trained: dict[tuple[str, str], list[Trained]], name: str, layout: str
) -> None:
    assert_alike(others_trained[name, layout], others_trained[name, "one rank"][0])


def test_what_one_layout_saves_another_one_resumes(
    run_ranks: Any, tmp_path: Path, trained: dict[str, list[Trained]]
) -> None:
    def main() -> list[list[tuple[float, float]]]:
        with pytest.MonkeyPatch.context() as patch:
            with_values(patch)
            with tiny_run(laid_out(LAYOUTS["tensor 2 x pipeline 2 x memory 2, recomputed"])) as run:
                run.train(1)
                run.save(tmp_path)
            found = []
            for name in ("tensor 2", "pipeline 2 x memory 2"):
                with tiny_run(laid_out(LAYOUTS[name])) as run:
                    run.resume(tmp_path / "step_00000001")
                    found.append(run.train(1))
        return found

    for steps in run_ranks(main, 4)[0]:
        for (loss, norm), (expected_loss, expected_norm) in zip(steps, trained["one rank"][0].steps[1:], strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_a_rank_without_a_token_answers_for_its_columns(run_ranks: Any) -> None:
    """Ranks of a group that has one rank generate do so."""
    assert run_ranks(lambda: answers_without_a_token([CONFIG]), 2) == [1, 1]
