"""Trained models put to use: held-out loss and generation."""
