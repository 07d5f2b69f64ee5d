"""`gather_dot` in C++, as a custom op of PyTorch: `torch.compile` takes it as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.gather_dot.op import empty_result


@torch.library.custom_op("megamem::cpu_gather_dot", mutates_args=())
def gather_dot(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """The function of `kernels.gather_dot.naive.gather_dot`, without gradients."""
    cpp.check_rows(table, ids)
    dtype, width = x.dtype, table.shape[1]
    types, x = cpp.types_of(table, x)
    ids, bins = ids.contiguous(), None if bins is None else bins.contiguous()
    out = empty_result(table, ids, x, num_groups)
    sizes = (*ids.shape, num_groups, width, x.shape[1] // width)
    cpp.call("gather_dot", "gather_dot", types, table, ids, x, bins, out, *sizes)
    return out.to(dtype)


gather_dot.register_fake(empty_result)
