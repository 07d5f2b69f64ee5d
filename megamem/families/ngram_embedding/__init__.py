"""N-grams in the input embedding: projected rows of a token's n-grams are averaged with its own (LongCat)."""
