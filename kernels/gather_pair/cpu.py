"""`gather_pair` in C++: its two gathers, one after the other, whose products and coefficients stay in cache."""

from __future__ import annotations

from kernels.gather_dot.cpu import gather_dot
from kernels.gather_pair.weighting import pair_of_gathers
from kernels.gather_sum.cpu import gather_sum

gather_pair = pair_of_gathers(gather_dot, gather_sum)
