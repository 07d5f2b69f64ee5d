"""Bytes that ranks hold, and kernels that they launch, by closed formulas."""
