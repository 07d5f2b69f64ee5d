"""A run on disk: its folder, its owner, its history, its checkpoints and data, and what keeps it from starting. No torch."""
