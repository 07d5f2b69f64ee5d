"""`megamem gpu-check`: what a machine's GPUs compute, beside what a CPU does, in one page."""
