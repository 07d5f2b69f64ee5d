"""Public codes of the papers, and parameters under their names."""
