"""The families of memories: a folder for what is one family's own, and one line in the registry for each."""
