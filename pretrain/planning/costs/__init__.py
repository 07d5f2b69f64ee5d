"""Costs of models, layouts and steps, by closed formulas: parameters, operations, bytes read, sent and held."""
