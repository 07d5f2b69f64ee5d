"""Seconds of steps and checkpoints, and bytes that ranks send in them, by closed formulas."""
