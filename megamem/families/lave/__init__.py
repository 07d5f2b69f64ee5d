"""LaVE: layer-wise value embeddings, a table per layer for attention's values (MoVE, Eq. 6)."""
