"""Tables of memories in training: ways in which their gradients are added up, and in which they are updated, wherever they lie."""
