"""The laboratory's tests of GPUs are skipped without one, as the product's are."""

from tests.gpu.conftest import gpu

__all__ = ["gpu"]
