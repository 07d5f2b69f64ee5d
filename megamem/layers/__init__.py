"""Memory layers, one module per variant."""
