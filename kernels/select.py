"""The memory kernels of a model, in the implementation that `train.kernels` names.

An op is a folder and a field of `Kernels`. Its implementations are found by their names (`implementation_of`): see
"Adding an op" in README.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernels.common import cpp
from kernels.common.tables import GatherDot, GatherSum, SegmentAccumulate
from kernels.doubly_stochastic.op import DoublyStochastic
from kernels.implementations import Implementation, KernelUnavailableError, automatic, unavailable
from kernels.mix_streams.op import MixStreams
from kernels.ngram_hashes.op import NgramHashes
from kernels.normal_product.op import NormalProduct
from kernels.product_topk.op import ProductTopk
from kernels.rms_norm.op import RmsNorm
from kernels.rotated_heads.op import RotatedHeads
from kernels.row_squares.op import RowSquares
from kernels.row_update.op import RowUpdate
from kernels.shuffled_rows.op import ShuffledRows
from kernels.softmax_gradient.op import SoftmaxGradient
from kernels.softmax_sums.op import SoftmaxSums
from kernels.swiglu.op import SwiGLU
from kernels.tucker_scores.op import TuckerScores
from kernels.tucker_topk.op import TuckerTopk
from kernels.weigh_streams.op import WeighStreams


@dataclass(frozen=True)
class Kernels:
    """The ops of the memory layers, of updates of their tables, of the backbone and of the loss, differentiable where they
    have a gradient. Their arguments are the naive twins'."""

    gather_sum: GatherSum
    gather_dot: GatherDot
    segment_accumulate: SegmentAccumulate
    tucker_topk: TuckerTopk
    product_topk: ProductTopk
    shuffled_rows: ShuffledRows
    ngram_hashes: NgramHashes
    tucker_scores: TuckerScores
    row_squares: RowSquares
    row_update: RowUpdate
    swiglu: SwiGLU
    softmax_sums: SoftmaxSums
    softmax_gradient: SoftmaxGradient
    rotated_heads: RotatedHeads
    rms_norm: RmsNorm
    doubly_stochastic: DoublyStochastic
    mix_streams: MixStreams
    weigh_streams: WeighStreams
    normal_product: NormalProduct

    implementations: Mapping[str, Implementation]
    """Implementation chosen for each op."""
    raw: Mapping[str, Any]
    """Each op as that implementation has it, without autograd: what the differentiable ones are made of."""


OPS = tuple(field.name for field in fields(Kernels) if field.name not in ("implementations", "raw"))
"""The name of every op: its folder, its field of `Kernels`, and its functions."""


def select_kernels(
    implementation: Implementation = "auto",
    overrides: Mapping[str, Implementation] | None = None,
    *,
    device_type: str | None = None,
) -> Kernels:
    """The kernels for tensors on one type of device; compiles the C++ ones if that was not done yet.

    Args:
        implementation: name of the implementation of every op.
        overrides: names for single ops, by op; for tests and benchmarks.
        device_type: "cuda" or "cpu", where the tables are; None: CUDA if there is any.

    Raises:
        KernelUnavailableError: an implementation cannot run here.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = resolve(implementation, overrides or {}, device_type)
    for op, name in chosen.items():
        if reason := unavailable(name, device_type):
            raise KernelUnavailableError(f"{op}: the implementation {name} {reason}")
    return assemble(chosen, {op: implementation_of(op, name) for op, name in chosen.items()})


def resolve(
    implementation: Implementation, overrides: Mapping[str, Implementation], device_type: str
) -> dict[str, Implementation]:
    """The implementation of each op: without `auto`, and torch instead of C++ or Triton that it has not.

    Arguments as of `select_kernels`.

    Raises:
        KernelUnavailableError: an op is overridden to be in C++ or Triton and has none.
    """
    assert set(overrides) <= set(OPS), overrides
    chosen: dict[str, Implementation] = {}
    for op in OPS:
        name = overrides.get(op, implementation)
        name = automatic(device_type) if name == "auto" else name
        if not _has_source(op, name):
            if overrides.get(op) == name:
                language = {"cpu": "C++", "triton": "Triton"}[name]
                raise KernelUnavailableError(f"{op}: there is no {language} implementation: use auto or torch")
            name = "torch"
        chosen[op] = name
    return chosen


def _has_source(op: str, name: Implementation) -> bool:
    """False for a file that an op need not have: C++ or Triton, where PyTorch's operations are enough."""
    sources = {"cpu": cpp.source(op), "triton": Path(__file__).parent / op / "triton_op.py"}
    return name not in sources or sources[name].exists()


def implementation_of(op: str, name: Implementation) -> Any:
    """The op as one implementation has it, without autograd; compiled if it is in C++."""
    if name == "cpu":
        cpp.library(op)
    if name in ("cpu", "torch"):
        return getattr(import_module(f"kernels.{op}.op"), f"{name}_{op}")
    return getattr(import_module(f"kernels.{op}.{'naive' if name == 'naive' else 'triton_op'}"), op)


def assemble(chosen: Mapping[str, Implementation], raw: Mapping[str, Any]) -> Kernels:
    """Kernels made of these implementations.

    `differentiable` in an op's `op.py` takes those that its parameters name. A naive twin leaves its gradients to
    PyTorch, and an op without `differentiable` has none.
    """
    made = dict(raw)
    for op in OPS:
        differentiable = getattr(import_module(f"kernels.{op}.op"), "differentiable", None)
        if differentiable is not None and chosen[op] != "naive":
            made[op] = differentiable(**{name: raw[name] for name in inspect.signature(differentiable).parameters})
    return Kernels(**made, implementations=chosen, raw=raw)
