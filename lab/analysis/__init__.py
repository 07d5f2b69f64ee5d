"""Measurements on ranks of what trained models, with and without token tables, do with rare and common tokens."""
