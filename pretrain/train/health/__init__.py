"""What a run of weeks meets: spikes, NaNs, hangs, slow or wrong hardware, memory that runs out; docs/health.md."""
