"""The `megamem config` command: configurations as a run would see them, and every key that there is."""
