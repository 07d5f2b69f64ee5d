"""Settings of the laboratory's tests, beside those of all tests (../../conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _several_chunks_of_the_laboratory() -> Iterator[None]:
    """Make every test reach a second chunk of what is done in chunks."""
    from lab.tests.small_chunks import CHUNKS
    from tests.small_chunks import small

    with small(CHUNKS):
        yield
