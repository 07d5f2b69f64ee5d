"""Mark of tests that take long and seldom break."""

from __future__ import annotations

import os

import pytest


def costly(command: str) -> pytest.MarkDecorator:
    """Mark that leaves a test to a command, which sets MEGAMEM_COSTLY and names the file."""
    return pytest.mark.skipif("MEGAMEM_COSTLY" not in os.environ, reason=f"costly: `{command}` runs it")


COSTLY = costly("make test-more")
