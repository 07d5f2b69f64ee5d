"""A compiled module of Apex, which nothing here calls."""
