"""Training: the loop, its callbacks, stages one after the other, and what watches over weeks of it."""
