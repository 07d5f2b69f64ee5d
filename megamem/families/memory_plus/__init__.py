"""Memory+: product keys, and values gated by silu of the input."""
