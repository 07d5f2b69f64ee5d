"""PEER: product keys over experts of width 1 (UltraMemV2, Eq. 13)."""
