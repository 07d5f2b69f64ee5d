"""Models that are told random facts, and then asked for them."""
