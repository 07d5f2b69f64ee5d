"""Marks of tests that want something that may not be there."""

from __future__ import annotations

import os

import pytest

from pretrain.engine.tables.value_offload import has_deepspeed

NEEDS_DEEPSPEED = pytest.mark.skipif(
    not has_deepspeed() and os.environ.get("MEGAMEM_DEEPSPEED") != "required",
    reason="deepspeed is not installed (`make test-more` installs it)",
)
"""Skips tests without DeepSpeed; where it was to be installed, they run and fail without it."""
