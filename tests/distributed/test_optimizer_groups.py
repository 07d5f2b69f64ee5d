"""Every parameter is in one optimizer group, on every layout, and each group steps with its own rate and decay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import PRIVATE, SHARED, TinyRun, global_parameter_name, on, tiny_run
from torch import Tensor, nn

from megamem.parameters.declaration import GroupName, ReducedOver, declare, group_of
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schedule import group_settings
from pretrain.config.schema import RunConfig
from pretrain.engine.build_optimizer import DENSE_GROUPS, SPLIT_GROUPS, assign_groups

GROUPS = (*DENSE_GROUPS, *SPLIT_GROUPS)
DENSE = replace(SHARED, model=replace(SHARED.model, memory=None))


def num_elements(model: RunConfig) -> dict[str, int]:
    """Elements per group, counted by hand from the model's widths."""
    m = model.model
    hidden, inner, width = m.hidden_size, m.ffn_hidden_size, m.attention_head_dim
    padded = 64
    attention = hidden * width * (2 * m.num_attention_heads + 2 * m.query_groups)
    counts = {
        "backbone": m.num_layers * (attention + 3 * hidden * inner) + padded * hidden * (1 if m.tied_embeddings else 2),
        "backbone_no_decay": m.num_layers * (2 * hidden + 2 * width) + hidden,
        "retrieval": 0,
        "experts": 0,
        "values": 0,
        "pre_values": 0,
    }
    if (memory := m.memory) is not None:
        keys = int((memory.num_keys**2 * memory.sharing.group) ** 0.5)
        per_layer = (
            4 * memory.key_dim * hidden
            + memory.num_heads * 2 * keys * memory.key_dim * 2
            + 2 * memory.num_heads * 4
            + hidden * (memory.value_dim + memory.pre_value_dim)
        )
        rows = m.num_layers * memory.num_keys**2
        counts["retrieval"] = m.num_layers * per_layer
        counts["backbone_no_decay"] += m.num_layers * 2 * memory.key_dim
        counts["values"], counts["pre_values"] = rows * memory.value_dim, rows * memory.pre_value_dim
    return counts


def declared(module: nn.Module, group: GroupName = "backbone") -> nn.Module:
    for parameter in module.parameters():
        declare(parameter, group, reduced_over=ReducedOver.DATA)
    return module


def test_frozen_parameters_are_in_no_group() -> None:
    chunk = nn.ModuleDict({"a": declared(nn.Linear(2, 2)), "b": nn.Linear(2, 2)})
    chunk["b"].requires_grad_(False)
    assigned = assign_groups([chunk])
    assert sum(len(parameters) for parameters in assigned.values()) == 2


def test_a_parameter_in_two_groups_is_noticed() -> None:
    shared = declared(nn.Linear(2, 2, bias=False))
    with pytest.raises(AssertionError, match="do not add up"):
        assign_groups([nn.ModuleDict({"a": shared}), nn.ModuleDict({"b": shared})])


def test_a_trainable_parameter_of_which_nothing_was_said_is_named() -> None:
    chunk = nn.ModuleDict({"a": declared(nn.Linear(2, 2)), "b": nn.Linear(2, 2, bias=False)})
    with pytest.raises(AssertionError, match=r"no optimizer group is declared for the parameter b\.weight"):
        assign_groups([chunk])


def test_a_group_that_is_reduced_over_other_ranks_than_its_optimizer_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"a\.weight"):
        assign_groups([nn.ModuleDict({"a": declared(nn.Linear(2, 2), "values")})])


def test_nothing_is_declared_twice() -> None:
    with pytest.raises(AssertionError):
        declared(declared(nn.Linear(2, 2)))


def group_summary(run: TinyRun) -> dict[str, Any]:
    """Groups and sizes that the optimizer of a rank holds."""
    assigned = assign_groups(run.bare)
    num_updated: Counter[str] = Counter()
    for group in run.optimizer.param_groups:
        num_updated[group["name"]] += sum(p.numel() for p in group["params"])
    return {
        "order": [[g["name"] for g in part.param_groups] for part in run.optimizer.chained_optimizers],
        "assigned": {name: sum(p.numel() for p in parameters) for name, parameters in assigned.items()},
        "updated": dict(num_updated),
        "trainable": sum(p.numel() for bare in run.bare for p in bare.parameters() if p.requires_grad),
    }


CASES = {
    "shared": (SHARED, 1),
    "private": (PRIVATE, 1),
    "dense": (DENSE, 1),
    "data 2": (SHARED, 2),
    "pipeline 2": (on(PRIVATE, pipeline=2), 2),
    "interleaved": (on(PRIVATE, pipeline=2, virtual_pipeline=2), 2),
}


@pytest.fixture(scope="module")
def summaries(run_ranks: Any) -> dict[str, list[dict[str, Any]]]:
    result: dict[str, list[dict[str, Any]]] = {}
    for num_ranks in (1, 2):
        names = [name for name, (_, ranks) in CASES.items() if ranks == num_ranks]

        def main(names: list[str] = names) -> list[dict[str, Any]]:
            found = []
            for name in names:
                with tiny_run(CASES[name][0]) as run:
                    found.append(group_summary(run))
            return found

        by_rank = run_ranks(main, num_ranks)
        result |= {name: [of_rank[i] for of_rank in by_rank] for i, name in enumerate(names)}
    return result


@pytest.mark.parametrize("name", CASES)
def test_groups_add_up_to_the_model(summaries: dict[str, list[dict[str, Any]]], name: str) -> None:
    config, _ = CASES[name]
    expected = num_elements(config)
    for of_rank in summaries[name]:
        assert sum(of_rank["assigned"].values()) == of_rank["trainable"]
    # Stages together are the model, replicas are each the whole of it.
    stages = summaries[name] if config.parallel.pipeline > 1 else summaries[name][:1]
    total: Counter[str] = Counter()
    for of_stage in stages:
        total.update(of_stage["assigned"])
    assert {group: total[group] for group in GROUPS} == expected
    # The distributed optimizer splits every group over the replicas: together they update each element once.
    updated: Counter[str] = Counter()
    for of_rank in summaries[name]:
        updated.update(of_rank["updated"])
    assert {group: updated[group] for group in GROUPS} == expected


@pytest.mark.parametrize("name", CASES)
def test_groups_exist_in_one_order_on_every_rank(summaries: dict[str, list[dict[str, Any]]], name: str) -> None:
    parts = [list(DENSE_GROUPS)] if name == "dense" else [list(DENSE_GROUPS), list(SPLIT_GROUPS)]
    for of_rank in summaries[name]:
        assert of_rank["order"] == parts


def moved(config: RunConfig) -> dict[str, tuple[str, Tensor, Tensor, Tensor]]:
    """Group, weight before, weight after, and gradient of every parameter after one step."""
    with tiny_run(config) as run:
        (bare,) = run.bare
        before = {name: p.detach().clone() for name, p in bare.named_parameters()}
        run.train(1)
        return {
            global_parameter_name(name, range(4)): (
                group_of(name, p),
                before[name],
                p.detach().clone(),
                p.main_grad.detach().clone(),
            )
            for name, p in bare.named_parameters()
        }


def test_the_first_step_is_adamw_at_each_groups_rate_and_decay(run_ranks: Any) -> None:
    """AdamW with moments from one gradient moves by lr g / (|g| + eps) after decaying by lr wd."""
    config = replace(
        SHARED,
        optimizer=OptimizerConfig(
            lr=1e-3,
            schedule="constant",
            weight_decay=0.3,
            value_weight_decay=0.05,
            value_lr_multiplier=4.0,
            pre_value_lr_multiplier=0.5,
            clip_grad=0.5,
        ),
    )
    (parameters,) = run_ranks(lambda: moved(config), 1)
    expected = group_settings(0, config.optimizer, config.train)
    assert len({rate for rate, _ in expected.values()}) == 3
    # Every group but that of a mixture's experts, which this model does not have.
    assert {group for group, *_ in parameters.values()} == set(GROUPS) - {"experts"}
    for name, (group, before, after, gradient) in parameters.items():
        lr, decay = expected[group]
        wide = gradient.double()
        step = lr * wide / (wide.abs() + config.optimizer.epsilon)
        torch.testing.assert_close(
            after.double(), before.double() * (1 - lr * decay) - step, rtol=1e-5, atol=lr * 1e-4, msg=name
        )


@pytest.mark.parametrize("clip_grad", [0.5, 1e6, 0.0])
def test_one_norm_clips_all_groups(run_ranks: Any, clip_grad: float) -> None:
    """The gradients of tables and dense parameters are scaled by one coefficient, and none without clipping."""
    config = replace(SHARED, optimizer=replace(SHARED.optimizer, clip_grad=clip_grad))

    def main() -> tuple[float, float]:
        with tiny_run(config) as run:
            ((_, norm),) = run.train(1)
            left = sum(float(p.main_grad.double().square().sum()) for bare in run.bare for p in bare.parameters())
            return norm, left**0.5

    ((norm, left),) = run_ranks(main, 1)
    assert norm > 0.5
    assert left == pytest.approx(0.5 if clip_grad == 0.5 else norm, rel=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(run_ranks: Any) -> None:
    def main() -> tuple[list[int], list[bool], list[tuple[float, float]]]:
        with tiny_run(SHARED) as run:
            (bare,) = run.bare

            def everything() -> list[Tensor]:
                states = [state for part in run.optimizer.chained_optimizers for state in part.optimizer.state.values()]
                moments = [t for state in states for t in state.values()]
                return [t.detach().clone() for t in (*bare.parameters(), *moments)]

            run.train(1)
            before, skipped = everything(), [run.num_skipped]
            hook = bare.decoder.final_layernorm.register_forward_hook(lambda module, args, out: out * float("inf"))
            run.train(1)
            hook.remove()
            skipped.append(run.num_skipped)
            same = [torch.equal(a, b) for a, b in zip(before, everything(), strict=True)]
            history = run.train(1)
            return [*skipped, run.num_skipped], same, history

    ((skipped, same, ((loss, norm),)),) = run_ranks(main, 1)
    assert skipped == [0, 1, 1]
    assert len(same) > 3 * 40
    assert all(same)
    assert 0 < loss < 10
    assert 0 < norm < 100
