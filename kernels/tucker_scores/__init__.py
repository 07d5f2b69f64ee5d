"""The scores of what a Tucker-decomposed retrieval kept, one for each core, and their gradients."""
