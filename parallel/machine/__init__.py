"""Machines below a rank: GPUs, a stand-in for CUDA, threads and environment, files, and what the system refuses."""
