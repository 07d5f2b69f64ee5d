"""STEM: a feed-forward whose up-projection is the token's row (arXiv 2601.10639)."""
