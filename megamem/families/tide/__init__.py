"""TIDE: tables indexed by the token, read once and added beside the feed-forward of every layer."""
