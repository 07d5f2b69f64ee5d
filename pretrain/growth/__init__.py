"""Growing a pretrained model in depth: blocks of memory, or copies, between its own."""
