"""Update of rows of a table by their gradients."""
