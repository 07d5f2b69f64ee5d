"""Health of a run of weeks: spikes, NaNs, hangs, slow or wrong hardware, memory that runs out; docs/health.md."""
