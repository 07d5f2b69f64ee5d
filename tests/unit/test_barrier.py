"""Waiting for all ranks, without ranks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from parallel.groups import barrier


@pytest.mark.parametrize(("backend", "named"), [("nccl", [3]), ("gloo", None)])
def test_a_barrier_names_the_gpu(monkeypatch: pytest.MonkeyPatch, backend: str, named: list[int] | None) -> None:
    """Gloo refuses to be told one."""
    waited = Mock()
    monkeypatch.setattr(dist, "barrier", waited)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    barrier()
    waited.assert_called_once_with(device_ids=named)
