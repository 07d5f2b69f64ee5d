"""N-grams in attention's values: narrow rows of a token's n-grams, gated and added to all heads' values or to one's."""
