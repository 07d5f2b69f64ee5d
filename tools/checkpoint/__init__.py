"""The `megamem checkpoint` command: look into checkpoints of any format, verify, compare and convert them."""
