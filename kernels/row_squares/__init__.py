"""Sum of squares of each row of a gradient."""
