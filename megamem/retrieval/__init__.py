"""Retrieval: from a token's hidden state to the entries it reads and their scores."""
