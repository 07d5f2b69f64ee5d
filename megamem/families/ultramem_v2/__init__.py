"""UltraMemV2: Tucker-decomposed retrieval, pre-values, and one value projection (UltraMemV2, section 3)."""
