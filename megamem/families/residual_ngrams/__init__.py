"""N-grams in the residual stream: rows of a token's n-grams, summed once and added before every block by a weight of its own."""
