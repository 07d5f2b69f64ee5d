"""What the folders of the ops have in common. See kernels/README.md."""
