"""Parts that a model chunk is built of and given: its memories, inputs of a microbatch, halos, machinery."""
