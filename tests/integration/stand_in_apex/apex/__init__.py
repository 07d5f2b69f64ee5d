"""A stand-in for Apex: what Megatron and the product import of it, computed by PyTorch on any device."""
