"""Synthetic tasks that ask whether a model can use what stands far back in its context. They need no download."""
