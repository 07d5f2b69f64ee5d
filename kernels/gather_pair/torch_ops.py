"""`gather_pair` in PyTorch: its two gathers, one after the other."""

from __future__ import annotations

from kernels.gather_dot.torch_ops import gather_dot
from kernels.gather_pair.weighting import pair_of_gathers
from kernels.gather_sum.torch_ops import gather_sum

gather_pair = pair_of_gathers(gather_dot, gather_sum)
