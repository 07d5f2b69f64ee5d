"""`megamem bench kernels --static`: the Triton kernels judged by their machine code, on a machine without a GPU."""
