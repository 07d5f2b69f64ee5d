"""Code that the folders of the ops share. See kernels/README.md."""
