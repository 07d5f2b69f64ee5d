"""The blocks of a model, with their memories, and the loop over those of a chunk."""
