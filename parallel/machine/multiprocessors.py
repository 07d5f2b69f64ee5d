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
        ValueError: this build of PyTorch, or this driver, makes none.
    """
    number = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        return GreenContext.create(num_sms=max(1, round(share * number / GROUP)) * GROUP, device_id=device.index)
    except RuntimeError as error:
        raise ValueError(
            f"parallel.gradient_sm_share is {share:g}, and torch {torch.__version__} cannot give a share of this GPU to a "
            f"stream ({str(error).splitlines()[0]}): use a build and a driver of CUDA 12.8 or later, or 1"
        ) from error
