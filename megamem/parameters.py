"""Declarations made where a parameter is created: its device, its optimizer group, the ranks that sum its gradient.

Nothing is read off a parameter's name. A trainable parameter of which nothing is declared is an error (`group_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

GroupName = Literal["backbone", "backbone_no_decay", "retrieval", "experts", "values", "pre_values"]
"""Matrices and vectors of the backbone, matrices of memory layers, experts of a mixture, and the two tables.

Gains and biases, of memory layers too, are in `backbone_no_decay`."""


class ReducedOver(Enum):
    """The ranks whose gradients of a parameter are added up."""

    DATA = "data"
    """Data- and context-parallel ranks. Tensor-parallel ones hold other shards of it, or have the same gradient."""
    TOKENS = "tokens"
    """Those and the tensor-parallel ranks, each of which has seen its own share of the sequence."""
    STAGE = "stage"
    """All ranks of the stage with the same shard; buffers and optimizer are Megatron's for expert parallelism."""


def parameter_device(config: TransformerConfig) -> torch.device:
    """The device that Megatron's own layers allocate their parameters on."""
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())


def declare(
    parameter: nn.Parameter, group: GroupName, *, reduced_over: ReducedOver, tensor_dim: int | None = None
) -> None:
    """Tell the optimizer and Megatron what they have to know of a parameter.

    Args:
        parameter: new.
        group: whose learning rate, decay and clipping it gets.
        reduced_over: whose gradients are added up.
        tensor_dim: the dimension that tensor-parallel ranks split; None: each of them holds it whole, and the global
            gradient norm counts it on the first of them alone.
    """
    assert not is_declared(parameter)
    parameter.optimizer_group = group  # type: ignore[attr-defined]
    match reduced_over:
        case ReducedOver.TOKENS:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        case ReducedOver.STAGE:
            parameter.allreduce = False  # type: ignore[attr-defined]
    if tensor_dim is not None:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=tensor_dim, stride=1)


@dataclass(frozen=True)
class Copy:
    """A stage's copy of a parameter that several pipeline stages hold: number `index` of `count`."""

    index: int = 0
    count: int = 1


ONLY_COPY = Copy()


def mark_copy(parameter: nn.Parameter, copy: Copy) -> None:
    """Say that the stages of a pipeline hold copies of a parameter, whose gradients are added up (`sum_over_stages`).

    Megatron gives what it takes for a tied embedding a bucket of its own, so that all copies are cut over their
    replicas in the same places; and the global norm counts the first copy alone.
    """
    if copy.count > 1:
        parameter.on_every_stage = True  # type: ignore[attr-defined]
        parameter.shared_embedding = True  # type: ignore[attr-defined]
        parameter.shared = copy.index > 0  # type: ignore[attr-defined]


def is_on_every_stage(parameter: nn.Parameter) -> bool:
    """True if the stages hold copies of it, see `mark_copy`."""
    return getattr(parameter, "on_every_stage", False)


def is_declared(parameter: nn.Parameter) -> bool:
    """True if its optimizer group is declared."""
    return hasattr(parameter, "optimizer_group")


def group_of(name: str, parameter: nn.Parameter) -> GroupName:
    """The declared group of the parameter of this name."""
    if not is_declared(parameter):
        raise AssertionError(
            f"no optimizer group is declared for the parameter {name}: whoever creates it calls "
            "megamem.parameters.declare"
        )
    group: GroupName = parameter.optimizer_group  # type: ignore[attr-defined]
    return group
