"""`megamem study bench`: the speed of configurations, of the parts of a step, and of the memory kernels."""
