"""The host's AdamW is the textbook's, whichever implementation it is; and which one it is, is no guess."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from pretrain.config.optimizer import OptimizerConfig
from pretrain.engine.tables import value_offload
from pretrain.engine.tables.value_offload import HostAdamW, host_adamw
from pretrain.errors import ConfigError
from tests.unit.needs import NEEDS_DEEPSPEED

SETTINGS = OptimizerConfig(lr=7e-4, beta1=0.85, beta2=0.97, epsilon=1e-6, weight_decay=0.3)

IMPLEMENTATIONS = [
    pytest.param(False, id="torch"),
    pytest.param(True, id="deepspeed", marks=NEEDS_DEEPSPEED),
]


def implementation(monkeypatch: pytest.MonkeyPatch, deepspeed: bool) -> HostAdamW:
    monkeypatch.setattr(value_offload, "has_deepspeed", lambda: deepspeed)
    return host_adamw(SETTINGS)


def with_deepspeed(monkeypatch: pytest.MonkeyPatch, optimizer: Any) -> None:
    """A package of that name, with this for its Adam."""
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.adam"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["deepspeed.ops.adam"].DeepSpeedCPUAdam = optimizer  # type: ignore[attr-defined]


def textbook(
    state: tuple[Tensor, Tensor, Tensor], gradient: Tensor, step: int, lr: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2 of "Decoupled Weight Decay Regularization", in float64."""
    weights, first, second = state
    first = SETTINGS.beta1 * first + (1 - SETTINGS.beta1) * gradient
    second = SETTINGS.beta2 * second + (1 - SETTINGS.beta2) * gradient**2
    unbiased = second / (1 - SETTINGS.beta2**step)
    move = first / (1 - SETTINGS.beta1**step) / (unbiased.sqrt() + SETTINGS.epsilon)
    return weights - lr * decay * weights - lr * move, first, second


@pytest.mark.parametrize("deepspeed", IMPLEMENTATIONS)
def test_updates_follow_the_textbook_at_any_rate_and_decay(monkeypatch: pytest.MonkeyPatch, deepspeed: bool) -> None:
    adamw = implementation(monkeypatch, deepspeed)
    generator = torch.Generator().manual_seed(3)
    size, split = 1037, 640
    weights = torch.randn(size, generator=generator)
    actual = (weights.clone(), torch.zeros(size), torch.zeros(size))
    expected = (weights.double(), torch.zeros(size).double(), torch.zeros(size).double())
    for step, (lr, decay) in enumerate([(1e-3, 0.3), (2e-3, 0.0), (5e-4, 0.7), (1e-2, 0.1)], start=1):
        gradient = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-4, 2, (size,), generator=generator)
        expected = textbook(expected, gradient.double(), step, lr, decay)
        for window in (slice(0, split), slice(split, size)):
            adamw.update(
                *(tensor[window] for tensor in (actual[0], gradient, *actual[1:])),
                num_updates=step - 1,
                lr=lr,
                weight_decay=decay,
            )
        for here, there in zip(actual, expected, strict=True):
            torch.testing.assert_close(here.double(), there, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("deepspeed", IMPLEMENTATIONS)
def test_windows_of_different_ages_do_not_mix(monkeypatch: pytest.MonkeyPatch, deepspeed: bool) -> None:
    """Bias correction follows the number that is handed in, not the number of calls."""
    adamw = implementation(monkeypatch, deepspeed)
    moved = []
    for num_updates in (0, 5, 0, 1000):
        weights, gradient = torch.zeros(64), torch.ones(64)
        adamw.update(
            weights, gradient, torch.zeros(64), torch.zeros(64), num_updates=num_updates, lr=1.0, weight_decay=0.0
        )
        moved.append(float(weights[0]))
    step = torch.tensor([1.0, 6.0, 1.0, 1001.0], dtype=torch.float64)
    corrected = (1 - SETTINGS.beta1) / (1 - SETTINGS.beta1**step)
    expected = -corrected / (((1 - SETTINGS.beta2) / (1 - SETTINGS.beta2**step)).sqrt() + SETTINGS.epsilon)
    assert moved == pytest.approx(expected.tolist(), rel=1e-5)


def test_deepspeed_steps_where_it_is_installed_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Stand(torch.optim.SGD):
        def __init__(self, parameters: Any, **arguments: Any) -> None:
            made.append(arguments)
            super().__init__(parameters)

    with_deepspeed(monkeypatch, Stand)
    assert implementation(monkeypatch, True).name == "DeepSpeed's CPU AdamW"
    assert made == [{"adamw_mode": True, "lr": 7e-4, "betas": (0.85, 0.97), "eps": 1e-6, "weight_decay": 0.3}]
    assert implementation(monkeypatch, False).name == "PyTorch's fused AdamW"
    assert len(made) == 1


def test_a_killed_build_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch's own builder, and a lock file of it that nobody will remove."""
    monkeypatch.setenv("MEGAMEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/of/the/user")
    builds: list[Path] = []

    class Stand(torch.optim.SGD):
        def __init__(self, parameters: Any, **_: Any) -> None:
            super().__init__(parameters)
            folder = Path(cpp_extension._get_build_directory("cpu_adam", verbose=False))
            builds.append(folder)
            baton = FileBaton(str(folder / "lock"))
            assert baton.try_acquire()
            # As a process that is killed would: never released.

    with_deepspeed(monkeypatch, Stand)
    for _ in range(2):
        implementation(monkeypatch, True)
    first, second = builds
    assert first == second
    assert tmp_path in first.parents
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/of/the/user"


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGAMEM_CACHE_DIR", str(tmp_path / "file"))
    with_deepspeed(monkeypatch, torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"cannot be built in .*file .*set MEGAMEM_CACHE_DIR"):
        implementation(monkeypatch, True)


def test_a_deepspeed_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("it failed to build") from RuntimeError("Ninja is required to load C++ extensions")

    with_deepspeed(monkeypatch, fail)
    with pytest.raises(
        ConfigError, match=r"optimizer.value_offload is cpu .* \(Ninja is required .* uninstall deepspeed"
    ):
        implementation(monkeypatch, True)
