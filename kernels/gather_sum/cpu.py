"""`gather_sum` in C++, as a custom op of PyTorch: `torch.compile` takes it as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.gather_sum.op import empty_result


@torch.library.custom_op("megamem::cpu_gather_sum", mutates_args=())
def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum`, without gradients."""
    cpp.check_rows(table, ids)
    types, coef = cpp.types_of(table, coef)
    ids, bins = ids.contiguous(), None if bins is None else bins.contiguous()
    out = empty_result(table, ids, coef, bins, num_bins)
    cpp.call("gather_sum", "gather_sum", types, table, ids, coef, bins, out, *coef.shape, table.shape[1], num_bins)
    return out


gather_sum.register_fake(empty_result)
