"""The memory kernels of a model, in the implementation that `train.kernels` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.gather_dot import naive as naive_gather_dot
from kernels.gather_dot.forward import grouped_gather_dot
from kernels.gather_dot.op import differentiable_gather_dot
from kernels.gather_sum import naive as naive_gather_sum
from kernels.gather_sum.forward import grouped_gather_sum
from kernels.gather_sum.op import differentiable_gather_sum
from kernels.implementations import SELECTIONS, Implementation, KernelUnavailableError, Op, resolve, unavailable
from kernels.pieces import Gather, Pieces
from kernels.retrieval import PRODUCT_TOPK, TUCKER_TOPK, ProductTopk, TuckerTopk
from kernels.segment_accumulate import naive as naive_segment_accumulate
from kernels.segment_accumulate.forward import segment_accumulate


@dataclass(frozen=True)
class Kernels:
    """The selections and gathers that carry every memory layer, and what the gathers are made of; their signatures are those of the naive twins."""

    gather_sum: Gather
    gather_dot: Gather
    tucker_topk: TuckerTopk
    product_topk: ProductTopk
    pieces: Pieces
    """What both gathers are made of, without autograd."""
    implementations: Mapping[Op, Implementation]
    """What was chosen for each op."""


def select_kernels(
    implementation: Implementation = "auto",
    overrides: Mapping[str, Implementation | None] | None = None,
    *,
    device_type: str | None = None,
) -> Kernels:
    """The kernels for tensors on one type of device.

    Args:
        implementation: of every op.
        overrides: of single ops; None means `implementation`.
        device_type: "cuda" or "cpu", where the tables are; None: CUDA if there is any.

    Raises:
        KernelUnavailableError: an implementation cannot run here.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = resolve(implementation, overrides, device_type)
    for op, name in chosen.items():
        if reason := unavailable(name, device_type):
            raise KernelUnavailableError(f"{op}: the implementation {name} {reason}")
    built = {name: pieces_of(name) for op, name in chosen.items() if op not in SELECTIONS}
    pieces = Pieces(
        built[chosen["gather_sum"]].sum_rows,
        built[chosen["gather_dot"]].dot_rows,
        built[chosen["segment_accumulate"]].accumulate,
    )
    return Kernels(
        gather_sum=naive_gather_sum.gather_sum
        if chosen["gather_sum"] == "naive"
        else differentiable_gather_sum(pieces),
        gather_dot=naive_gather_dot.gather_dot
        if chosen["gather_dot"] == "naive"
        else differentiable_gather_dot(pieces),
        tucker_topk=TUCKER_TOPK[chosen["tucker_topk"]],
        product_topk=PRODUCT_TOPK[chosen["product_topk"]],
        pieces=pieces,
        implementations=chosen,
    )


def pieces_of(implementation: Implementation) -> Pieces:
    """The three operations of one implementation. Builds the C++ ones if that was not done yet."""
    if implementation == "naive":
        return Pieces(
            naive_gather_sum.gather_sum, naive_gather_dot.dot_rows, naive_segment_accumulate.segment_accumulate
        )
    if implementation == "cpu":
        from kernels.cpu import build, ops

        build.library()
        return Pieces(ops.sum_rows, ops.dot_rows, ops.accumulate)
    if implementation == "triton":
        from kernels import triton_ops

        return Pieces(triton_ops.sum_rows, triton_ops.dot_rows, triton_ops.accumulate)
    assert implementation == "torch", implementation
    return Pieces(grouped_gather_sum, grouped_gather_dot, segment_accumulate)
