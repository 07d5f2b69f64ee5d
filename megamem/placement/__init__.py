"""Places of memories in a model: slots of a block, spans of blocks, the tables that layers share, the plan of all blocks."""
