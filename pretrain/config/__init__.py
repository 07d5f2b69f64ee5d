"""The configuration of a run: its schema, the loader, and the checks that need more than one section."""
