"""Patches: rows of memory tables that training changed, put into checkpoints and taken back."""
