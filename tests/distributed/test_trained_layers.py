"""Training of a part of a model: like autograd and PyTorch's AdamW on that part, on every layout; the rest stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_checkpoint_layouts import read_all
from test_kinds_layouts import KINDS as RETRIEVING
from test_token_layouts import KINDS as ADDRESSED
from tiny_runs import PRIVATE, SHARED, VOCAB_SIZE, TinyRun, joined, on, random_batches, tiny_run
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megamem.families.midus.config import MidusConfig
from megamem.parameters.trained_part import ALL, Trained
from megamem.placement.spans import PlacementConfig
from pretrain.config.schedule import group_settings
from pretrain.config.schema import RunConfig
from pretrain.engine.build import build_chunks
from pretrain.engine.step import Batch
from pretrain.planning.counts.formulas import training_flops_per_token
from tests.rotation import in_rotation, in_turn, named_in_rotation

# Tolerance of a loss or a gradient norm, against one rank.
TOLERANCE = 1e-5
# The second loss is that of weights that moved.
STEPS = 2


def training(config: RunConfig, *layers: int) -> RunConfig:
    """The run with these layers trained, whose loss comes in chunks."""
    return replace(
        config,
        optimizer=replace(config.optimizer, trained_layers=layers or None),
        train=replace(config.train, loss_chunk_tokens=16),
    )


TIED = replace(PRIVATE, model=replace(PRIVATE.model, tied_embeddings=True))
UPPER = training(PRIVATE, 3)
"""The third of four layers, each with a table of its own."""
LAST = training(TIED, 4)
SPREAD = training(TIED, 2, 4)
POOLED = training(SHARED, 4)
"""Training of the upper layer of a pair that shares a table: the lower one's reads are in the table's gradient."""


def naive_steps(
    config: RunConfig,
    num_steps: int,
    read: Callable[..., Iterator[Batch]] = random_batches,
    trained_names: frozenset[str] | None = None,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms of steps of one rank, and the weights after them, by autograd and PyTorch's AdamW on the weights
    that are trained: without Megatron's DDP, schedule or optimizer.
    """
    with joined(replace(config, parallel=type(config.parallel)())) as groups:
        whole = replace(config, optimizer=replace(config.optimizer, trained_layers=None))
        (model,) = build_chunks(whole, groups, vocab_size=VOCAB_SIZE)
        trained = {
            name: p
            for name, p in model.named_parameters()
            if (is_trained(name, config) if trained_names is None else name in trained_names)
        }
        adamw = [
            (name, torch.optim.AdamW([p], betas=(0.9, 0.95), eps=config.optimizer.epsilon))
            for name, p in trained.items()
        ]
        batches = read(config, groups)
        rows = []
        for step in range(num_steps):
            model.zero_grad()
            model.begin_step()
            parts = [next(batches) for _ in range(config.train.global_batch_size // config.train.micro_batch_size)]
            count = sum(float(part["loss_mask"].sum()) for part in parts)
            total = 0.0
            for part in parts:
                losses = model(part["tokens"], part["position_ids"], labels=part["labels"])
                loss = (losses * part["loss_mask"]).sum() / count
                loss.backward()
                total += float(loss)
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), config.optimizer.clip_grad)
            settings = group_settings(step, config.optimizer, config.train)
            for name, optimizer in adamw:
                group = trained[name].optimizer_group  # type: ignore[attr-defined]
                optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"] = settings[group]
                optimizer.step()
            rows.append((total, float(norm)))
        return rows, {name: p.detach().clone() for name, p in model.named_parameters()}


def is_trained(name: str, config: RunConfig) -> bool:
    """True for the names of trained parameters on one rank; banks of pairs serve two layers, others one."""
    layers = config.optimizer.trained_layers
    if layers is None:
        return True
    blocks = {number - 1 for number in layers}
    if name.startswith("banks."):
        bank = int(name.split(".")[1])
        shared = config.model.memory is not None and config.model.memory.sharing.pattern == "block"
        return not blocks.isdisjoint({2 * bank, 2 * bank + 1} if shared else {bank})
    return name.startswith("decoder.layers.") and int(name.split(".")[2]) in blocks


PARTS = named_in_rotation({"upper": UPPER, "last": LAST, "spread": SPREAD, "shared": POOLED}, 2)


@pytest.mark.parametrize("config", PARTS.values(), ids=PARTS)
def test_a_part_is_trained_as_autograd_would_and_the_rest_stands_still(run_ranks: Any, config: RunConfig) -> None:
    def check(recompute: Any, rows: list[tuple[float, float]], weights: dict[str, Tensor]) -> None:
        with tiny_run(on(config, recompute=recompute)) as run:
            (bare,) = run.bare
            initial = {name: p.detach().clone() for name, p in bare.named_parameters()}
            found = run.train(STEPS)
            for (loss, norm), (expected_loss, expected_norm) in zip(found, rows, strict=True):
                assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
                assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
            for name, weight in bare.named_parameters():
                assert weight.requires_grad == is_trained(name, config), name
                if is_trained(name, config):
                    assert not torch.equal(weight, initial[name]), name
                    torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-6, msg=name)
                else:
                    assert torch.equal(weight, initial[name]), name
                    assert not hasattr(weight, "main_grad")
            trained = {p for p in bare.parameters() if p.requires_grad}
            stepped = sum(p.numel() for p in trained)
            buffers = run.chunks[0].buffers + run.chunks[0].expert_parallel_buffers
            assert {p for buffer in buffers for p in buffer.params} == trained
            parts = run.optimizer.chained_optimizers
            held = sum(state["exp_avg"].numel() for part in parts for state in part.optimizer.state.values())
            assert held == stepped

    def main() -> None:
        rows, weights = naive_steps(config, STEPS)
        for recompute in ("none", "full", "selective"):
            check(recompute, rows, weights)

    run_ranks(main, 1)


@pytest.mark.parametrize(("config", "first"), [(UPPER, 2), (SPREAD, 1), (POOLED, 2)], ids=["upper", "spread", "shared"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_ends_at_the_lowest_layer_that_something_trained_is_in(
    run_ranks: Any, config: RunConfig, first: int, recompute: Any
) -> None:
    """Counted by the gradients that pass through the layers' outputs."""

    def main() -> tuple[list[int], list[int]]:
        with tiny_run(on(config, recompute=recompute)) as run:
            forward, backward = [0] * 4, [0] * 4
            (bare,) = run.bare
            for number, layer in enumerate(bare.decoder.layers):

                def begun(*_: Any, number: int = number) -> None:
                    forward[number] += 1

                def seen(_module: Any, _inputs: Any, out: Any, number: int = number) -> None:
                    if out.hidden.requires_grad:
                        out.hidden.register_hook(lambda _: backward.__setitem__(number, backward[number] + 1))

                layer.self_attention.register_forward_hook(begun)
                layer.register_forward_hook(seen)
            run.train(1)
            return forward, backward

    ((forward, backward),) = run_ranks(main, 1)
    # Two microbatches; what is recomputed goes forward twice.
    again = 4 if recompute == "full" else 2
    assert forward == [2] * first + [again] * (4 - first)
    assert backward == [0] * first + [2] * (4 - first)


@dataclass(frozen=True)
class Layout:
    config: RunConfig
    num_ranks: int
    axes: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "data 2": Layout(SPREAD, 2),
    "tensor 2, shared, full recomputation": Layout(POOLED, 2, {"tensor": 2, "recompute": "full"}),
    "context 2 x memory 2": Layout(SPREAD, 2, {"context": 2, "memory": 2}),
    "pipeline 2, the last stage alone": Layout(UPPER, 2, {"pipeline": 2, "micro_batch_size": 2}),
    "pipeline 2, the first stage alone": Layout(training(TIED, 1), 2, {"pipeline": 2, "micro_batch_size": 2}),
    "pipeline 2, both stages, full recomputation": Layout(
        SPREAD, 2, {"pipeline": 2, "micro_batch_size": 2, "recompute": "full"}
    ),
    "pipeline 2 x virtual 2": Layout(UPPER, 2, {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 2}),
    "pipeline 2 x virtual 2, the last chunk": Layout(
        LAST, 2, {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 2, "recompute": "full"}
    ),
    "pipeline 4": Layout(UPPER, 4, {"pipeline": 4, "micro_batch_size": 2}),
    "pipeline 2 x data 2 x memory 2": Layout(LAST, 4, {"pipeline": 2, "memory": 2, "micro_batch_size": 1}),
    "tensor 2 x pipeline 2 x virtual 2": Layout(
        SPREAD, 4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 2}
    ),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_layout_trains_the_same_part(run_ranks: Any, num_ranks: int) -> None:
    layouts = named_in_rotation({name: layout for name, layout in LAYOUTS.items() if layout.num_ranks == num_ranks})
    configs = list(dict.fromkeys(layout.config for layout in layouts.values()))
    (references,) = run_ranks(lambda: [naive_steps(config, STEPS)[0] for config in configs], 1)
    expected = dict(zip(configs, references, strict=True))

    def main() -> dict[str, list[tuple[float, float]]]:
        found = {}
        for name, layout in layouts.items():
            with tiny_run(on(layout.config, **layout.axes)) as run:
                initial = [p.detach().clone() for p in parameters(run)]
                found[name] = run.train(STEPS)
                for before, parameter in zip(initial, parameters(run), strict=True):
                    assert torch.equal(before, parameter) != parameter.requires_grad
        return found

    for of_rank in run_ranks(main, num_ranks):
        for name, rows in of_rank.items():
            for row, reference in zip(rows, expected[layouts[name].config], strict=True):
                assert row == pytest.approx(reference, rel=TOLERANCE), name


def parameters(run: TinyRun) -> list[Tensor]:
    return [parameter for chunk in run.bare for parameter in chunk.parameters()]


def test_a_stage_below_what_is_trained_gets_no_gradients(run_ranks: Any) -> None:
    """Messages between stages without interleaving: outputs alone where nothing before them is trained."""

    def main() -> list[int]:
        counts = []
        for config in (UPPER, training(PRIVATE, 1, 3)):
            with tiny_run(on(config, pipeline=2, micro_batch_size=2)) as run, pytest.MonkeyPatch.context() as patch:
                sent: list[Any] = []
                real = dist.batch_isend_irecv
                patch.setattr(
                    dist, "batch_isend_irecv", lambda ops, real=real, sent=sent: sent.extend(ops) or real(ops)
                )
                run.train(1)
                counts.append(sum(op.op is dist.isend for op in sent))
        return counts

    # Four microbatches: the first stage's outputs, and the last one's gradients where somebody wants them.
    assert run_ranks(main, 2) == [[4, 4], [0, 4]]


BF16 = replace(PRIVATE, train=replace(PRIVATE.train, precision="bf16"))
STARTING_ANEW = named_in_rotation({"tied": TIED, "bf16": BF16, "shared": SHARED})


@pytest.mark.parametrize("config", STARTING_ANEW.values(), ids=STARTING_ANEW)
def test_what_becomes_trained_starts_anew_and_the_rest_goes_on(
    run_ranks: Any, tmp_path: Path, config: RunConfig
) -> None:
    """Two phases: some layers, then all of the model. In the second what is new has the moments, and counts the updates,
    of a run that starts there; what was trained before has those of a run that goes on."""
    first, second = training(config, 2), training(config)

    def main() -> None:
        with tiny_run(first) as run:
            run.train(2)
            path = run.save(tmp_path / "first")
            weights = {name: p.detach().clone() for name, p in run.bare[0].named_parameters()}
        tensors = read_all(path)
        for name, tensor in tensors.items():
            assert tensor.isfinite().all(), name
        states = {name.removeprefix("optimizer.state.param.") for name in tensors if ".param." in name}
        assert states
        assert not states & tensors.keys()
        with tiny_run(second) as run:
            for parameter in parameters(run):
                parameter.data.fill_(torch.nan)
            run.resume(path)
            assert run.run.state.trained == ((0, Trained((2,))), (2, ALL))
            for name, parameter in run.bare[0].named_parameters():
                assert torch.equal(parameter, weights[name]), name
                state = state_of(run, parameter)
                if is_trained(name, first):
                    assert float(state["step"]) == 2
                    assert state["exp_avg"].any()
                else:
                    assert float(state["step"]) == 0
                    assert not state["exp_avg"].any()
                    assert not state["exp_avg_sq"].any()
                    assert torch.equal(state["param"], parameter.float().view(-1))
            rows = run.train(1)
            path = run.save(tmp_path / "second")
            rows += run.train(2)
            kept = {name: p.detach().clone() for name, p in run.bare[0].named_parameters()}
            steps = {name: float(state_of(run, p)["step"]) for name, p in run.bare[0].named_parameters()}
            assert steps == {name: 5.0 if is_trained(name, first) else 3.0 for name in kept}
        # Killed and gone on with, to the bit.
        with tiny_run(second) as run:
            run.resume(path)
            assert run.train(2) == rows[1:]
            for name, parameter in run.bare[0].named_parameters():
                assert torch.equal(parameter, kept[name]), name
        # Back to a part of the model: everything else keeps its values, and the checkpoint has them.
        with tiny_run(training(config, 1)) as run:
            run.resume(path)
            assert run.run.state.updates_of(lambda part: part.layers is None or 1 in part.layers) == 1
            again = run.save(tmp_path / "third")
            assert not [
                name for name in read_all(again) if name.startswith("optimizer.state.") and ".layers.2." in name
            ]

    run_ranks(main, 1)


def state_of(run: TinyRun, parameter: Any) -> dict[str, Tensor]:
    for part in run.optimizer.chained_optimizers:
        if parameter in part.model_param_group_index_map:
            index, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[index]["params"][order]
            return {"param": main.detach(), **part.optimizer.state[main]}
    raise AssertionError("it is not stepped")


@in_turn(0)
def test_both_phases_go_on_on_other_layouts(run_ranks: Any, tmp_path: Path) -> None:
    """Each phase on two layouts, one after the other, against one rank."""
    first, second = training(TIED, 2, 3), training(TIED)

    def alone() -> list[tuple[float, float]]:
        with tiny_run(first) as run:
            rows = run.train(4)
            path = run.save(tmp_path / "alone")
        with tiny_run(second) as run:
            run.resume(path)
            return rows + run.train(4)

    (expected,) = run_ranks(alone, 1)
    layouts = [
        on(first, pipeline=2, virtual_pipeline=2, micro_batch_size=1),
        on(first, tensor=2, memory=2),
        on(second, pipeline=2, micro_batch_size=2),
        on(second, memory=2),
    ]

    def main() -> list[tuple[float, float]]:
        rows, path = [], None
        for number, config in enumerate(layouts):
            with tiny_run(config) as run:
                if path is not None:
                    run.resume(path)
                rows += run.train(2)
                path = run.save(tmp_path / f"phase {number}")
        return rows

    for of_rank in run_ranks(main, 2):
        for row, reference in zip(of_rank, expected, strict=True):
            assert row == pytest.approx(reference, rel=TOLERANCE)


# Of MIDUS's variants the one with all optional weights.
OTHERS = {kind for kind in RETRIEVING if "midus" in kind} - {"midus, projected, normalised queries"}
KINDS = {
    **{kind: memory for kind, memory in RETRIEVING.items() if kind not in {"pkm", *OTHERS}},
    **{kind: memory for kind, memory in ADDRESSED.items() if kind in ("move", "lave", "tide", "stem", "mome")},
    "midus": MidusConfig(num_heads=4, num_keys=9, top_k=3, value_dim=8, placement=PlacementConfig(blocks=(1, 3))),
}
IN_STAGES: dict[str, Any] = {"pipeline": 2, "micro_batch_size": 2}
INTERLEAVED: dict[str, Any] = {**IN_STAGES, "virtual_pipeline": 2}
STAGED: dict[str, dict[str, Any]] = {
    "ultramem": {"context": 2},
    "peer": INTERLEAVED,
    "midus": {**INTERLEAVED, "recompute": "full"},
    "move": {**INTERLEAVED, "recompute": "full"},
    "lave": IN_STAGES,
    "tide": {**IN_STAGES, "recompute": "full"},
    "stem": IN_STAGES,
    "mome": {**INTERLEAVED, "recompute": "full"},
}
"""A second layout: in stages, of banks that can be cut so; with cut sequences, of one kind of those that others retrieve like."""


@pytest.mark.parametrize("kind", in_rotation(list(KINDS)))
def test_every_kind_of_memory_can_be_trained_in_part(run_ranks: Any, kind: str) -> None:
    """The first layer behind another that has a memory, with the tables that it reads: like autograd, and alike on
    layouts.
    """
    model = replace(SHARED.model, memory=KINDS[kind])
    block = min(span.read for span in model.memory_spans if span.read > 0)
    config = training(replace(SHARED, model=model), block + 1)

    def alone() -> tuple[list[tuple[float, float]], list[tuple[float, float]], frozenset[str]]:
        with tiny_run(on(config, recompute="full")) as run:
            names = frozenset(name for name, p in run.bare[0].named_parameters() if p.requires_grad)
            rows = run.train(STEPS)
        return rows, naive_steps(config, STEPS, trained_names=names)[0], names

    def main() -> list[list[tuple[float, float]]]:
        found = []
        for axes in ({"tensor": 2, "memory": 2}, *([STAGED[kind]] if kind in STAGED else [])):
            with tiny_run(on(config, **axes)) as run:
                initial = [p.detach().clone() for p in parameters(run)]
                found.append(run.train(STEPS))
                for before, parameter in zip(initial, parameters(run), strict=True):
                    assert parameter.requires_grad or torch.equal(before, parameter)
        return found

    ((rows, expected, names),) = run_ranks(alone, 1)
    assert all(name.startswith((f"decoder.layers.{block}.", "banks.", "shared_read.")) for name in names)
    assert any(name.startswith("banks.") for name in names)
    for of_layout in [rows, *(each for of_rank in run_ranks(main, 2) for each in of_rank)]:
        for row, reference in zip(of_layout, expected, strict=True):
            assert row == pytest.approx(reference, rel=2e-5)


@pytest.mark.parametrize("layers", [(3,), (2, 4), (4,)])
def test_the_products_of_a_step_are_those_of_the_formula(run_ranks: Any, layers: tuple[int, ...]) -> None:
    """PyTorch counts the matrix products. The lowest block in backward has all gradients of inputs, for its norms."""
    dense = replace(PRIVATE, model=replace(PRIVATE.model, memory=None, vocab_size=VOCAB_SIZE))
    config = training(dense, *layers)
    config = replace(config, train=replace(config.train, loss_chunk_tokens=None))

    def main() -> int:
        with tiny_run(on(config)) as run, FlopCounterMode(display=False) as counter:
            run.train(1)
            counts = counter.get_flop_counts()["Global"]
            return sum(num for op, num in counts.items() if op is torch.ops.aten.mm)

    model, tokens = config.model, config.train.tokens_per_step
    # Attention's length enters its scores alone, which are no such products: of none, they are linear in it.
    one, two = (training_flops_per_token(model, length, Trained(layers)) for length in (1, 2))
    assert run_ranks(main, 1) == [tokens * (one - 2 * (two - one))]


@in_turn(1)
def test_tables_in_host_memory_are_trained_in_part_alike(run_ranks: Any, tmp_path: Path) -> None:
    """Through both phases, each gone on with from a checkpoint: a table that was not trained counts its own updates."""

    def main() -> dict[str, list[tuple[float, float]]]:
        found = {}
        for place in ("none", "cpu"):
            config = replace(PRIVATE, optimizer=replace(PRIVATE.optimizer, value_offload=place))
            rows: list[tuple[float, float]] = []
            path = None
            for number, phase in enumerate((training(config, 2), training(config), training(config))):
                with tiny_run(on(phase, memory=2)) as run:
                    if path is not None:
                        run.resume(path)
                    rows += run.train(2)
                    path = run.save(tmp_path / f"{place} {number}")
            found[place] = rows
        return found

    for of_rank in run_ranks(main, 2):
        for row, reference in zip(of_rank["cpu"], of_rank["none"], strict=True):
            assert row == pytest.approx(reference, rel=TOLERANCE)
