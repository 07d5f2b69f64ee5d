"""Every implementation, as all tests of kernels take it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.implementations import unavailable
from kernels.select import Kernels, select_kernels
from tests.small_chunks import TILES, small


@pytest.fixture(params=("torch", "cpu", "triton"), scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every implementation that this machine can run; the others are skipped with the reason. Triton's programs have few
    columns.
    """
    if reason := unavailable(request.param, "cpu"):
        pytest.skip(f"{request.param} {reason}")
    with small(TILES):
        yield select_kernels(request.param, device_type="cpu")


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests trace kernels with `torch.compile`, which the suite imports Megatron without."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
