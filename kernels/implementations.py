"""The names that `train.kernels` takes, and what `auto` means. Imports no torch: configurations are checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Implementation = Literal["auto", "torch", "naive"]
"""auto: see `resolve`; torch: PyTorch operations without large temporaries; naive: the oracles, by PyTorch's autograd."""

Op = Literal["gather_sum", "gather_dot", "segment_accumulate", "tucker_topk", "product_topk"]
OPS: tuple[Op, ...] = get_args(Op)


def resolve(
    implementation: Implementation, overrides: Mapping[str, Implementation | None] | None = None
) -> dict[Op, Implementation]:
    """The implementation of each op, `auto` replaced by torch.

    Args:
        implementation: of every op.
        overrides: of single ops; None means `implementation`.
    """
    assert set(overrides or {}) <= set(OPS), overrides
    wanted = {op: (overrides or {}).get(op) or implementation for op in OPS}
    return {op: "torch" if name == "auto" else name for op, name in wanted.items()}
