"""Memory layers: what all have in common, and the retrieval of those that score keys."""
