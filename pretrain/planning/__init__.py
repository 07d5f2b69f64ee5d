"""Plans: costs by closed formulas, and one rank of a run built without its devices."""
