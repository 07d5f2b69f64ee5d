"""Watches on a rank that is dry-run on a stand-in for a GPU: what passes to and from its host, and in which order its bytes are used."""
