"""Chunks of the laboratory's loops, small in all of its tests, as those of the product's are."""

from __future__ import annotations

from tests.small_chunks import Chunks

CHUNKS: Chunks = {
    "lab.analysis.deciles": {"_TOKENS_AT_ONCE": 50},
    "lab.analysis.ngrams": {"_NGRAMS_AT_ONCE": 5},
}
"""Constants by module, and what they are in tests."""
