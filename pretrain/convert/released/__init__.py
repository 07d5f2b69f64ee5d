"""The public codes' checkpoints as a format to convert from and to."""
