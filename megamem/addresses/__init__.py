"""Addresses of tokens by which memories find their rows, where these are not the tokens' own ids."""
