"""Checkpoints of a plain GPTModel in the `torch_dist` format, as Megatron-LM writes them, to train on here."""
