"""Tensors on disk, without ranks: names, global shapes, dtypes and regions. No process group, no model, no GPU."""
