"""The formats of checkpoints that can be opened and written, and what all of them can do: convert, compare, verify."""
