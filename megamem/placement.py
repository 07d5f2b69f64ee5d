"""Where parameters are allocated."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


def parameter_device(config: TransformerConfig) -> torch.device:
    """The device that Megatron's own layers allocate their parameters on."""
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
