"""Our own checkpoints as a format to convert from and to."""
