"""Retrieval: from a token's hidden state to the slots it reads and their scores."""
