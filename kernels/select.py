"""The memory kernels of a model, in the implementation that `train.kernels` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.gather_dot import naive as naive_gather_dot
from kernels.gather_dot.forward import grouped_gather_dot
from kernels.gather_dot.op import differentiable_gather_dot
from kernels.gather_pair import naive as naive_gather_pair
from kernels.gather_pair.forward import pair_of_gathers
from kernels.gather_pair.op import differentiable_gather_pair, separate_gathers
from kernels.gather_sum import naive as naive_gather_sum
from kernels.gather_sum.forward import grouped_gather_sum
from kernels.gather_sum.op import differentiable_gather_sum
from kernels.implementations import SELECTIONS, Implementation, KernelUnavailableError, Op, resolve, unavailable
from kernels.pieces import Accumulate, DotRows, Gather, GatherPair, Pieces, SumRows
from kernels.retrieval import PRODUCT_TOPK, TUCKER_TOPK, ProductTopk, TuckerTopk
from kernels.segment_accumulate import naive as naive_segment_accumulate
from kernels.segment_accumulate.forward import segment_accumulate


@dataclass(frozen=True)
class Kernels:
    """The selections and gathers that carry every memory layer, and what the gathers are made of; their signatures are those of the naive twins."""

    gather_sum: Gather
    gather_dot: Gather
    gather_pair: GatherPair
    tucker_topk: TuckerTopk
    product_topk: ProductTopk
    pieces: Pieces
    """What the gathers are made of, without autograd."""
    implementations: Mapping[Op, Implementation]
    """What was chosen for each op; nothing for a pair that is gather_dot and gather_sum one after the other."""


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
    sum_rows, dot_rows = built[chosen["gather_sum"]].sum_rows, built[chosen["gather_dot"]].dot_rows
    pair, pair_gradients = pair_of_gathers(sum_rows, dot_rows)
    if "gather_pair" in chosen:
        pair, pair_gradients = built[chosen["gather_pair"]].pair, built[chosen["gather_pair"]].pair_gradients
    pieces = Pieces(sum_rows, dot_rows, pair, pair_gradients, built[chosen["segment_accumulate"]].accumulate)
    gather_sum, gather_dot = differentiable_gathers(chosen, pieces)
    return Kernels(
        gather_sum=gather_sum,
        gather_dot=gather_dot,
        gather_pair=differentiable_pair(chosen, pieces, gather_sum, gather_dot),
        tucker_topk=TUCKER_TOPK[chosen["tucker_topk"]],
        product_topk=PRODUCT_TOPK[chosen["product_topk"]],
        pieces=pieces,
        implementations=chosen,
    )


def differentiable_gathers(chosen: Mapping[Op, Implementation], pieces: Pieces) -> tuple[Gather, Gather]:
    """`gather_sum` and `gather_dot`, made of these pieces but where a naive one was chosen."""
    return (
        naive_gather_sum.gather_sum if chosen["gather_sum"] == "naive" else differentiable_gather_sum(pieces),
        naive_gather_dot.gather_dot if chosen["gather_dot"] == "naive" else differentiable_gather_dot(pieces),
    )


def differentiable_pair(
    chosen: Mapping[Op, Implementation], pieces: Pieces, gather_sum: Gather, gather_dot: Gather
) -> GatherPair:
    """`gather_pair`, made of these pieces but where the naive one was chosen; of the two gathers where none was."""
    match chosen.get("gather_pair"):
        case None:
            return separate_gathers(gather_dot, gather_sum)
        case "naive":
            return naive_gather_pair.gather_pair
        case _:
            return differentiable_gather_pair(pieces)


def pieces_of(implementation: Implementation) -> Pieces:
    """The operations of one implementation. Builds the C++ ones if that was not done yet."""
    if implementation == "triton":
        from kernels import triton_ops
        from kernels.gather_pair import triton_ops as triton_pair

        return Pieces(
            triton_ops.sum_rows,
            triton_ops.dot_rows,
            triton_pair.pair,
            triton_pair.pair_gradients,
            triton_ops.accumulate,
        )
    if implementation == "cpu":
        from kernels.cpu import build, ops

        build.library()
        return _with_pair_of_gathers(ops.sum_rows, ops.dot_rows, ops.accumulate)
    if implementation == "naive":
        return _with_pair_of_gathers(
            naive_gather_sum.gather_sum, naive_gather_dot.dot_rows, naive_segment_accumulate.segment_accumulate
        )
    assert implementation == "torch", implementation
    return _with_pair_of_gathers(grouped_gather_sum, grouped_gather_dot, segment_accumulate)


def _with_pair_of_gathers(sum_rows: SumRows, dot_rows: DotRows, accumulate: Accumulate) -> Pieces:
    return Pieces(sum_rows, dot_rows, *pair_of_gathers(sum_rows, dot_rows), accumulate)
