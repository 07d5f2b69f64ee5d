"""`megamem plan`: which layout to reserve GPUs for."""
