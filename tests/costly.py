"""Mark of tests that take long and seldom break."""

from __future__ import annotations

import os

import pytest

COSTLY = pytest.mark.skipif("MEGAMEM_COSTLY" not in os.environ, reason="costly: `make test-more` runs it")
