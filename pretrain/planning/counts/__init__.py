"""Weights, operations and stages of a model, by closed formulas."""
