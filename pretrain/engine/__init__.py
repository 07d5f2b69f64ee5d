"""Megatron's objects made from a configuration (model, optimizer, groups of parameters), and one training step of them."""
