"""The configuration of a run: its schema, the loader that turns YAML into it, and the checks that need more than one section."""
