"""UltraMem, UltraMemV2's ancestor: implicit value expansion, and a projection per virtual block."""
