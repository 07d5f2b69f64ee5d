"""The memory kernels of a model, in the implementation that `train.kernels` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.gather_dot import naive as naive_gather_dot
from kernels.gather_dot.forward import grouped_gather_dot
from kernels.gather_dot.op import differentiable_gather_dot
from kernels.gather_sum import naive as naive_gather_sum
from kernels.gather_sum.forward import grouped_gather_sum
from kernels.gather_sum.op import differentiable_gather_sum
from kernels.implementations import Implementation, Op, resolve
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
    """The gathers without autograd, for code that exchanges rows between ranks."""
    implementations: Mapping[Op, Implementation]
    """What was chosen for each op."""


def select_kernels(
    implementation: Implementation = "auto",
    overrides: Mapping[str, Implementation | None] | None = None,
) -> Kernels:
    """The kernels for tensors on one type of device.

    Args:
        implementation: of every op.
        overrides: of single ops; None means `implementation`.
    """
    chosen = resolve(implementation, overrides)
    gathers: tuple[Op, ...] = ("gather_sum", "gather_dot", "segment_accumulate")
    built = {name: pieces_of(name) for name in {chosen[op] for op in gathers}}
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
    """The three operations of one implementation."""
    if implementation == "naive":
        return Pieces(
            naive_gather_sum.gather_sum, naive_gather_dot.dot_rows, naive_segment_accumulate.segment_accumulate
        )
    assert implementation == "torch", implementation
    return Pieces(grouped_gather_sum, grouped_gather_dot, segment_accumulate)
