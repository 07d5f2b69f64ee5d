"""A family without retrieval, keys or scores: the rows of a token are hashes of its id."""
