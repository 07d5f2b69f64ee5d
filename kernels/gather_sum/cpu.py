"""`gather_sum` in C++, as a custom op of PyTorch: `torch.compile` takes it as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.gather_sum.op import empty_result


@torch.library.custom_op(
    "megamem::cpu_gather_sum",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor coef, Tensor? block, int num_blocks) -> Tensor",
)
def _gather_sum(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None, num_blocks: int) -> Tensor:
    cpp.check_rows(table, ids)
    types, coef = cpp.types_of(table, coef)
    ids, block = ids.contiguous(), None if block is None else block.contiguous()
    out = empty_result(table, ids, coef, block, num_blocks)
    cpp.call("gather_sum", "gather_sum", types, table, ids, coef, block, out, *coef.shape, table.shape[1], num_blocks)
    return out


_gather_sum.register_fake(empty_result)


def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum`, without gradients."""
    out: Tensor = _gather_sum(table, ids, coef, block, num_blocks)
    return out
