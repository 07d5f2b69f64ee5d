"""Shared parts of the gathers' autograd ops: calls under `torch.compile`, and the gradients of tables.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.segment_accumulate.op import SegmentAccumulate


def apply_gather(gather: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`gather.apply(*arguments)`, which `torch.compile` does not trace if a table carries a `main_grad`.

    Backward then writes to an attribute of a parameter, and returns a sparse tensor: neither can be traced. With
    `fullgraph=True` that is an error, which says so.
    """
    if torch.compiler.is_compiling() and any(isinstance(a, Tensor) and hasattr(a, "main_grad") for a in arguments):
        out: Tensor = _apply_untraced(gather, *arguments)
    else:
        out = gather.apply(*arguments)
    return out


@torch.compiler.disable(
    reason="backward of a gather adds to the main_grad of its table, which cannot be traced: "
    "compile without fullgraph=True"
)
def _apply_untraced(gather: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = gather.apply(*arguments)
    return out


def table_gradient(
    table: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None = None, *, accumulate: SegmentAccumulate
) -> Tensor:
    """Gradient that backward of a gather returns for its table.

    Under Megatron's DDP the gradient is added to `table.main_grad`, and the result is an empty sparse tensor: it costs
    nothing, and DDP's hook still fires. Otherwise it is the dense gradient.

    Args:
        table: [rows, W], the parameter.
        ids, coef, vec, bins: see `kernels.segment_accumulate.naive.segment_accumulate`.
        accumulate: the implementation.
    """
    main_grad = getattr(table, "main_grad", None)
    if main_grad is None:
        # Added up in fp32 at least, and rounded once.
        gradient = torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
        accumulate(gradient, ids, coef, vec, bins)
        return gradient.to(table.dtype)
    accumulate(main_grad, ids, coef, vec, bins)
    table.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=table.device),
        table.new_empty(0, table.shape[1]),
        table.shape,
        check_invariants=False,
    )
