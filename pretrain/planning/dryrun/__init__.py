"""One rank of a run of any size, built and stepped once without memory, devices or other ranks."""
