"""MoVE: one bank of value embeddings for all layers, mixed into attention's values."""
