"""CUDA streams that leave a part of the GPU to others."""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda.green_contexts import GreenContext

GROUP = 8
"""Multiprocessors that the driver hands out together from Hopper on; it rounds up."""


def context_of_share(device: torch.device, share: float) -> Any:
    """A green context whose streams' kernels run on `share` of the multiprocessors, in whole groups.

    While they are free, kernels of other streams run there too. A stream does not keep its context.

    Raises:
        ValueError: this PyTorch gives its contexts no streams.
    """
    if not hasattr(GreenContext, "Stream"):
        raise ValueError(
            f"parallel.gradient_sm_share is {share:g}, for which torch {torch.__version__} is too old: use torch 2.12 or "
            "later, or 1"
        )
    number = torch.cuda.get_device_properties(device).multi_processor_count
    return GreenContext.create(num_sms=max(1, round(share * number / GROUP)) * GROUP, device_id=device.index)
