"""Declarations of families that retrieve from a grid of keys: settings, costs, initial weights, released names."""
