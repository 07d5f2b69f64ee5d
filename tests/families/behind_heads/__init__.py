"""A family in a slot of its own, where no family of the product acts: behind attention's heads."""
