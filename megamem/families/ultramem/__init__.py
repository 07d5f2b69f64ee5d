"""UltraMem: UltraMemV2's ancestor, with implicit value expansion and a projection per virtual block (UltraMemV2,
section 2)."""
