"""These tests need an NVIDIA GPU, and are skipped without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is false")
    return torch.device("cuda")
