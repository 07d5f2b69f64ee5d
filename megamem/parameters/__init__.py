"""Parameters of a model: what is declared of each, their shards in checkpoints, and those that are trained."""
