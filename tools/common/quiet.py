"""Keeping other packages' notes out of a command's output."""

from __future__ import annotations

import logging
import warnings


def quiet_engine() -> None:
    """Hide Megatron's and PyTorch's notes on optional packages and internals, but no errors and no warnings of ours."""
    # The last one warns of a CUDA toolkit on a machine without GPUs.
    for logger in ("megatron", "torch.distributed", "torch.distributed.checkpoint", "torch.utils.cpp_extension"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(megatron|megatron_fsdp|torch)(\..*)?")
    # Megatron's schedules look at the gradient of activations that they are about to free; under the CPU stand-in
    # PyTorch takes us for the caller.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    # PyTorch 2.11 says so although tables' empty gradients are made with `check_invariants=False`.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
