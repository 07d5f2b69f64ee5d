"""Runs as Slurm jobs: what is submitted, what happens in the job, and what follows when an attempt ends."""
