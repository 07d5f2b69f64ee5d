"""Engram: rows addressed by hashes of the last tokens, gated into the residual stream before attention."""
