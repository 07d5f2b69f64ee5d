"""The laboratory: what makers of memory models measure with. It needs the product, and the product never imports it."""
