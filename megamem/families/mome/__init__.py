"""MoME: every key/value head chooses among the rows of a token, and adds its choice to its values."""
