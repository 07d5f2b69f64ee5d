"""Families of memories that only the tests have."""
