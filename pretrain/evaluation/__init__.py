"""Trained models put to use: held-out loss, generation, tasks on long texts, analyses of the memory."""
