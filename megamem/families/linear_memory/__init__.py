"""Linear memory: a key of its own for every row and head (MIDUS, appendix C)."""
