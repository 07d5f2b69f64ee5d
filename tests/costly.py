"""Mark of tests that take long and seldom break: `make test-more` selects them by its name, in the files that it lists."""

from __future__ import annotations

import pytest

COSTLY = pytest.mark.costly
"""Nothing else may be called so: `-k costly` would select it."""
