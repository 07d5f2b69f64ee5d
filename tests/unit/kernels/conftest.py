"""Every implementation, as all tests of kernels take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kernels.select import Kernels


@pytest.fixture(params=("torch", "cpu", "triton"), scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation that this machine can run; the others are skipped with the reason."""
    # Not at the top of the file, which can be read before `tests/conftest.py` has told Triton to interpret.
    from kernels.implementations import unavailable
    from kernels.select import select_kernels

    if reason := unavailable(request.param, "cpu"):
        pytest.skip(f"{request.param} {reason}")
    return select_kernels(request.param, device_type="cpu")
