"""Several residual streams: how sites read one input from them, write into them, and how a model ends with one."""
