"""Checkpoints: written whole or not at all, found by completeness, read without running any code they hold."""
