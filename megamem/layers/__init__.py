"""Memory layers: what all have in common, and what those share that retrieve in one way."""
