"""Megatron-LM's own checkpoints of one file per model-parallel rank (`--ckpt-format torch`), written and read."""
