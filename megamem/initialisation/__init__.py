"""Initial weights: their distributions, the numbers that fill them, and the size of the outputs that they give."""
