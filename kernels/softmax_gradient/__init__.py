"""Gradient of the cross entropy by logits, in their place."""
