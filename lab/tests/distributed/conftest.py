"""Ranks for the laboratory's distributed tests: those of the product's."""

from tests.distributed.conftest import _several_chunks_of_a_step, run_ranks

__all__ = ["_several_chunks_of_a_step", "run_ranks"]
