"""`megamem compare`: models on the same tokens, each tuned by as many trials, side by side."""
