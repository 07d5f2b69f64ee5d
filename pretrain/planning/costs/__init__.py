"""What models, layouts and steps cost, by closed formulas: parameters, operations, bytes read, sent and held."""
