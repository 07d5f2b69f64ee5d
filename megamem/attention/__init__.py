"""Attention of the backbone: its core and tiles, latents, documents that are kept apart, rotary positions, the cache."""
