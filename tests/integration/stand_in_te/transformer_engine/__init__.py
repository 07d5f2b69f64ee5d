"""A stand-in for Transformer Engine: the classes that Megatron derives from, computed by PyTorch on any device.

Arguments, parameter names, extra states and marks on parameters are those of version 2.9; fp8 there is none.
"""

from transformer_engine import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
