"""PKM: product-key memory (UltraMemV2, Eq. 3-5)."""
