"""Declarations made where a parameter is created: its device, its optimizer group, the ranks that sum its gradient,
the hidden matrices that it consists of, and how it follows the model's width.

Nothing is read off a parameter's name. A trainable parameter of which nothing is declared is an error (`group_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megamem.config.width import Width

GroupName = Literal["backbone", "backbone_no_decay", "retrieval", "experts", "values", "pre_values"]
"""Matrices and vectors of the backbone, matrices of memory layers, experts of a mixture, and the two tables.

Gains and biases, of memory layers too, are in `backbone_no_decay`."""


class ReducedOver(Enum):
    """The ranks whose gradients of a parameter are added up."""

    DATA = "data"
    """Data- and context-parallel ranks. Tensor-parallel ones hold other shards of it, or have the same gradient."""
    TOKENS = "tokens"
    """Data-, context- and tensor-parallel ranks, each of which has seen its own share of the sequence."""
    STAGE = "stage"
    """All ranks of the stage with the same shard; buffers and optimizer are Megatron's for expert parallelism."""


@dataclass(frozen=True)
class Matrices:
    """Hidden matrices that a parameter consists of: maps from one activation to another, which Muon may update.

    Embeddings, output projections, routers, gates with an output per slot, keys, cores and tables are none. Matrices that
    are stored in one parameter, for one product, are several.

    Attributes:
        rows: numbers of rows that belong to the matrices in turn, over and over; (): all rows are one matrix. Of the whole
            parameter, as tensor-parallel ranks hold its parts one below the other.
        by_rank: each tensor-parallel rank has matrices of its own, and no parts of common ones.
    """

    rows: tuple[int, ...] = ()
    by_rank: bool = False


def parameter_device(config: TransformerConfig) -> torch.device:
    """The device that Megatron's own layers allocate their parameters on."""
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())


def declare(
    parameter: nn.Parameter,
    group: GroupName,
    *,
    reduced_over: ReducedOver,
    tensor_dim: int | None = None,
    matrices: Matrices | None = None,
    width: Width = Width.NEITHER,
) -> None:
    """Tell the optimizer and Megatron what they have to know of a parameter.

    Args:
        parameter: new.
        group: optimizer group, which gives it learning rate, decay and clipping.
        reduced_over: ranks whose gradients are added up.
        tensor_dim: the dimension that tensor-parallel ranks split; None: each of them holds it whole, and the global
            gradient norm counts it on the first of them alone.
        matrices: matrices that it consists of; None: it is no hidden matrix.
        width: its rule for the model's width, in families that have one (`MemoryConfig.follows_width`) and in the
            backbone.
    """
    assert not is_declared(parameter)
    set_width(parameter, width)
    marked: Any = parameter
    marked.hidden_matrices, marked.optimizer_group = matrices, group
    match reduced_over:
        case ReducedOver.TOKENS:
            marked.sequence_parallel = True
        case ReducedOver.STAGE:
            marked.allreduce = False
    # Later versions of the engine than 0.16.1 say it of their own linears, whoever fills them.
    if tensor_dim is not None and not hasattr(parameter, "partition_dim"):
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=tensor_dim, stride=1)


def set_width(parameter: nn.Parameter, width: Width) -> None:
    """Say how a parameter follows the model's width, where its maker does not know of what it is a part."""
    marked: Any = parameter
    marked.follows_width = width


def width_of(parameter: nn.Parameter) -> Width:
    """The declared way in which a parameter follows the model's width."""
    width: Width = _mark(parameter, "follows_width")
    return width


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
        marked: Any = parameter
        marked.on_every_stage = marked.shared_embedding = True
        marked.shared = copy.index > 0


def is_on_every_stage(parameter: nn.Parameter) -> bool:
    """True if the stages hold copies of it, see `mark_copy`."""
    return getattr(parameter, "on_every_stage", False)


def is_declared(parameter: nn.Parameter) -> bool:
    """True if its optimizer group is declared."""
    return hasattr(parameter, "optimizer_group")


def matrices_of(parameter: nn.Parameter) -> Matrices | None:
    """The hidden matrices that a declared parameter consists of; None: it is none."""
    matrices: Matrices | None = _mark(parameter, "hidden_matrices")
    return matrices


def tensor_dim_of(parameter: nn.Parameter) -> int | None:
    """The dimension that tensor-parallel ranks split; None: each of them holds it whole."""
    return _mark(parameter, "partition_dim") if getattr(parameter, "tensor_model_parallel", False) else None


def group_of(name: str, parameter: nn.Parameter) -> GroupName:
    """The declared group of the parameter of this name."""
    if not is_declared(parameter):
        raise AssertionError(
            f"no optimizer group is declared for the parameter {name}: whoever creates it calls "
            "megamem.parameters.declaration.declare"
        )
    group: GroupName = _mark(parameter, "optimizer_group")
    return group


def _mark(parameter: nn.Parameter, name: str) -> Any:
    """A mark that was set, an attribute like those that Megatron reads."""
    return getattr(parameter, name)
