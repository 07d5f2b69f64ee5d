"""Tables whose main weights and moments are in host memory train as those on the device, bit for bit.

Without a GPU both are one memory, and the copies between them are copies all the same: the host's tensors are others
than the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_layouts import read_all
from test_moe import EXPERTS
from tiny_runs import PRIVATE, SHARED, TinyRun, on, tiny_run
from torch import Tensor

from pretrain.checkpoint.derived import main_name
from pretrain.config.schema import RunConfig
from pretrain.config.updates import TABLE_GROUPS
from pretrain.engine.build_optimizer import assign_groups
from pretrain.engine.tables import value_offload
from pretrain.engine.tables.value_offload import HostAdamW, HostTables
from tests.rotation import in_rotation
from tests.unit.needs import NEEDS_DEEPSPEED

# So small that every share of a table is several windows, the last of them shorter.
WINDOW = 512
SAVED_STEP, LAST_STEP = 1, 2

BF16 = replace(SHARED, train=replace(SHARED.train, precision="bf16"))
BESIDE_EXPERTS = replace(SHARED, model=replace(SHARED.model, moe=EXPERTS))


@dataclass(frozen=True)
class Case:
    """A model on a layout.

    Attributes:
        config, num_ranks: the model, and the ranks.
        to: place of the tables in a run that goes on from a checkpoint of the other place.
    """

    config: RunConfig
    num_ranks: int
    to: str


CASES = {
    "beside experts": Case(BESIDE_EXPERTS, 1, "host"),
    "own norm, data 2": Case(replace(SHARED, optimizer=replace(SHARED.optimizer, value_clip_grad=0.01)), 2, "host"),
    "fp32, data 2": Case(SHARED, 2, "device"),
    "bf16, tensor 2": Case(on(BF16, tensor=2), 2, "host"),
    "no pre-values, pipeline 2 x virtual 2": Case(
        on(PRIVATE, pipeline=2, virtual_pipeline=2, micro_batch_size=2), 2, "device"
    ),
}


@pytest.fixture(autouse=True)
def small_windows_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed computes the same to rounding, and has a test of its own."""
    monkeypatch.setattr(value_offload, "WINDOW_ELEMENTS", WINDOW)
    monkeypatch.setattr(value_offload, "has_deepspeed", lambda: False)


def offloaded(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, value_offload="cpu"))


def skip_a_step(run: TinyRun) -> None:
    """A step whose gradients are not finite."""
    hooks = [
        bare.decoder.final_layernorm.register_forward_hook(lambda module, args, out: out * float("inf"))
        for bare in run.bare
        if bare.post_process
    ]
    before = run.num_skipped
    run.train(1)
    for hook in hooks:
        hook.remove()
    assert run.num_skipped == before + 1


def first_half(config: RunConfig, folder: Path) -> None:
    with tiny_run(config) as run:
        run.train(SAVED_STEP)
        run.save(folder)
        second_half(run, folder)


def second_half(run: TinyRun, folder: Path) -> None:
    skip_a_step(run)
    run.train(LAST_STEP - SAVED_STEP)
    run.save(folder)


def resumed(config: RunConfig, source: Path, folder: Path) -> None:
    """The second half from a checkpoint of the first."""
    with tiny_run(config) as run:
        run.resume(source / f"step_{SAVED_STEP:08d}")
        second_half(run, folder)


@pytest.mark.parametrize("name", in_rotation(list(CASES)))
def test_every_tensor_of_the_checkpoint_is_the_same(run_ranks: Any, tmp_path: Path, name: str) -> None:
    """Also of a run that goes on on the other's checkpoint."""
    config, to = CASES[name].config, CASES[name].to

    def main() -> None:
        first_half(config, tmp_path / "device")
        first_half(offloaded(config), tmp_path / "host")
        if to == "device":
            resumed(config, tmp_path / "host", tmp_path / "resumed")
        else:
            resumed(offloaded(config), tmp_path / "device", tmp_path / "resumed")

    run_ranks(main, CASES[name].num_ranks, timeout_s=600)
    last = f"step_{LAST_STEP + 1:08d}"
    for step in (f"step_{SAVED_STEP:08d}", last):
        expected = read_all(tmp_path / "device" / step)
        assert any("exp_avg_sq.banks" in key and bool(tensor.any()) for key, tensor in expected.items())
        for folder in ("host", "resumed")[: 2 if step == last else 1]:
            actual = read_all(tmp_path / folder / step)
            assert actual.keys() == expected.keys()
            assert not [key for key in expected if not torch.equal(actual[key], expected[key])], (folder, step)


def test_rates_and_decay_of_tables_survive_resuming_on_another_layout(run_ranks: Any, tmp_path: Path) -> None:
    """The host steps the tables before, and the device or another layout's host after."""
    optimizer = replace(
        SHARED.optimizer,
        value_weight_decay=80.0,
        value_lr_multiplier=5.0,
        value_lr_end_multiplier=2.0,
        pre_value_lr_multiplier=0.2,
    )
    config = replace(SHARED, optimizer=optimizer)
    run_ranks(lambda: first_half(offloaded(config), tmp_path / "one"), 1)
    run_ranks(lambda: resumed(config, tmp_path / "one", tmp_path / "data 2"), 2)
    pipeline = on(offloaded(config), pipeline=2, micro_batch_size=2)
    run_ranks(lambda: resumed(pipeline, tmp_path / "one", tmp_path / "pipeline 2"), 2)
    before, expected = (read_all(tmp_path / "one" / f"step_{step:08d}") for step in (SAVED_STEP, LAST_STEP + 1))
    for table in ("banks.0.values", "banks.1.values", "banks.0.pre_values", "banks.1.pre_values"):
        name = main_name(table)
        distance = (expected[name] - before[name]).abs().max()
        assert distance > 0
        if not name.endswith("pre_values"):
            # At the values' rate, the decay is most of what a table moves by.
            assert float(expected[name].norm() / before[name].norm()) < 0.75
        for folder in ("data 2", "pipeline 2"):
            actual = read_all(tmp_path / folder / f"step_{LAST_STEP + 1:08d}")
            assert float((actual[name] - expected[name]).abs().max() / distance) < 1e-3, (name, folder)


@dataclass(frozen=True)
class Held:
    """Tables' state in the optimizer of a rank.

    Attributes:
        windows: sizes of what the host stepped, in order, over one step.
        host_bytes: bytes of main weights and moments in host memory.
        device_elements: elements of the split groups whose moments are on the device.
        aliases: a host tensor is the model's memory.
        table_elements: elements of the model's tables on this rank.
        owned_elements: number of them that the rank owns.
        text: the run's line about it.
    """

    windows: list[int]
    host_bytes: int
    device_elements: int
    aliases: bool
    table_elements: int
    owned_elements: int
    text: str


def held(config: RunConfig) -> Held:
    windows: list[int] = []
    update = HostAdamW.update

    def counting(self: HostAdamW, weights: Tensor, *arguments: Any, **keywords: Any) -> None:
        windows.append(weights.numel())
        update(self, weights, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch, tiny_run(config) as run:
        patch.setattr(HostAdamW, "update", counting)
        run.train(1)
        part = run.optimizer.chained_optimizers[1]
        (tables,) = part.rules
        assert isinstance(tables, HostTables)
        groups = assign_groups(run.bare)
        return Held(
            windows=windows,
            host_bytes=tables.host_bytes,
            device_elements=sum(state["exp_avg"].numel() for state in part.optimizer.state.values()),
            aliases=any(
                host.untyped_storage().data_ptr()
                in (s.weights.untyped_storage().data_ptr(), s.gradient.untyped_storage().data_ptr())
                for s in tables.shares
                for host in tables.state[s].values()
            ),
            table_elements=sum(p.numel() for name in TABLE_GROUPS for p in groups[name]),
            owned_elements=sum(s.weights.numel() for s in tables.shares),
            text=" ".join(run.optimizer.describe()),
        )


def test_the_host_holds_twelve_bytes_per_owned_element_and_the_device_none(run_ranks: Any) -> None:
    others = (BF16, BESIDE_EXPERTS)
    alone = run_ranks(lambda: [held(offloaded(config)) for config in others], 1)[0]
    of_two = run_ranks(lambda: held(offloaded(SHARED)), 2)
    for config, by_rank in zip((SHARED, *others), (of_two, *([each] for each in alone)), strict=True):
        experts = 0 if config.model.moe is None else 4 * 8 * 3 * 32 * 24
        assert sum(rank.owned_elements for rank in by_rank) == by_rank[0].table_elements
        for rank in by_rank:
            assert rank.host_bytes == 12 * rank.owned_elements
            assert rank.device_elements == experts
            assert not rank.aliases
            assert sum(rank.windows) == rank.owned_elements
            assert max(rank.windows) == WINDOW < rank.owned_elements / 8
            assert "PyTorch's fused AdamW" in rank.text


def test_nothing_is_said_of_tables_on_the_device(run_ranks: Any) -> None:
    def main() -> list[str]:
        with tiny_run(SHARED) as run:
            return list(run.optimizer.describe())

    assert run_ranks(main, 1) == [[]]


@NEEDS_DEEPSPEED
def test_deepspeed_steps_tables_to_rounding(run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_offload, "has_deepspeed", lambda: True)

    def main() -> tuple[list[tuple[float, float]], list[tuple[float, float]], list[str]]:
        with tiny_run(SHARED) as run:
            expected = run.train(10)
        with tiny_run(offloaded(SHARED)) as run:
            return expected, run.train(10), list(run.optimizer.describe())

    for expected, actual, text in run_ranks(main, 2, timeout_s=600):
        assert "DeepSpeed's CPU AdamW" in text[0]
        for here, there in zip(actual, expected, strict=True):
            assert here == pytest.approx(there, rel=1e-5)


# Clipping apart


def norms(config: RunConfig, num_steps: int = 2) -> Iterator[tuple[float, float, float, float]]:
    """Per step: the two norms that a run states, and those of what is left in the gradients after clipping, over this
    rank's shares, squared.
    """
    with tiny_run(config) as run:
        stated: list[Any] = []
        clip = run.optimizer.clip
        left: list[tuple[float, float]] = []

        def watching(norms: Any) -> None:
            clip(norms)
            stated.append(norms)
            sums = [0.0, 0.0]
            for part in run.optimizer.chained_optimizers:
                for group, gradient in part.gradients(counted_once=True):
                    sums[group in TABLE_GROUPS] += float(gradient.double().square().sum())
            left.append((sums[0], sums[1]))

        run.optimizer.clip = watching  # type: ignore[method-assign]
        run.train(num_steps)
        for both, (main, tables) in zip(stated, left, strict=True):
            yield both.main, -1.0 if both.tables is None else both.tables, main, tables


def together(by_rank: Sequence[Sequence[tuple[float, float, float, float]]]) -> list[tuple[float, float, float, float]]:
    """Stated norms, which all ranks agree on, and the norms left over all ranks."""
    steps = []
    for of_step in zip(*by_rank, strict=True):
        assert len({stated[:2] for stated in of_step}) == 1
        main, tables = (sum(rank[i] for rank in of_step) ** 0.5 for i in (2, 3))
        steps.append((*of_step[0][:2], main, tables))
    return steps


def with_clip(value_clip_grad: float | None, clip_grad: float = 0.5) -> RunConfig:
    return replace(SHARED, optimizer=replace(SHARED.optimizer, clip_grad=clip_grad, value_clip_grad=value_clip_grad))


def test_tables_are_clipped_by_their_own_norm(run_ranks: Any) -> None:
    on_device, on_host = with_clip(0.003), offloaded(with_clip(0.003))
    # Stages on the device, tensor-parallel ranks on the host, and replicas on both.
    layouts: tuple[tuple[RunConfig, dict[str, int]], ...] = (
        (on_device, {}),
        (on_device, {"pipeline": 2, "micro_batch_size": 2}),
        (on_host, {}),
        (on_host, {"tensor": 2}),
    )
    of_share = in_rotation(layouts, 2)
    alone = run_ranks(lambda: {config: list(norms(config)) for config, _ in of_share}, 1)[0]
    of_two = run_ranks(lambda: [list(norms(on(config, **layout))) for config, layout in of_share], 2)
    for (config, _), by_rank in zip(of_share, zip(*of_two, strict=True), strict=True):
        one = together([alone[config]])
        for here, there in zip(together(by_rank), one, strict=True):
            assert here == pytest.approx(there, rel=1e-5)
        for main, tables, main_left, tables_left in one:
            assert main > 0.5
            assert tables > 0.003
            assert main_left == pytest.approx(0.5, rel=1e-5)
            # Megatron's offset in the quotient is 1e-6.
            assert tables_left == pytest.approx(0.003, rel=1e-3)


def test_the_two_norms_make_up_the_global_one(run_ranks: Any) -> None:
    def main() -> list[tuple[float, float, float, float]]:
        return [next(norms(with_clip(value, clip), 1)) for value, clip in ((None, 0.5), (1e6, 1e6), (0.0, 0.0))]

    together_, apart, unclipped = run_ranks(main, 1)[0]
    assert together_[1] == -1
    assert apart[:2] == unclipped[:2]
    assert (apart[0] ** 2 + apart[1] ** 2) ** 0.5 == pytest.approx(together_[0], rel=1e-9)
    assert apart[0] < together_[0]
    for main_norm, tables_norm, main_left, tables_left in (apart, unclipped):
        assert (main_left**0.5, tables_left**0.5) == pytest.approx((main_norm, tables_norm), rel=1e-6)


def test_a_table_gradient_that_is_not_finite_skips_the_step(run_ranks: Any) -> None:
    """The step is skipped even if the tables' norm is another than the one that the rest is clipped by."""

    def main() -> tuple[int, bool]:
        with tiny_run(offloaded(with_clip(1.0))) as run:
            before = [p.detach().clone() for bare in run.bare for p in bare.parameters()]
            prepare = run.optimizer.prepare_grads

            def spoiled() -> bool:
                result = prepare()
                for part in run.optimizer.chained_optimizers:
                    for group, gradient in part.gradients(counted_once=True):
                        if group == "pre_values":
                            gradient[0] = float("nan")
                return bool(result)

            run.optimizer.prepare_grads = spoiled  # type: ignore[method-assign]
            run.train(1)
            after = [p for bare in run.bare for p in bare.parameters()]
            return run.num_skipped, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    assert run_ranks(main, 1) == [(1, True)]
