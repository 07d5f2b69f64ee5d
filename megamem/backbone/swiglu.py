"""SwiGLU, the activation of every feed-forward and expert, in the place that Megatron has for one."""

from __future__ import annotations

from typing import ClassVar

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kernels.swiglu.op import SwiGLU


class _Activation(MegatronModule):
    """`kernels.swiglu` as Megatron's `MLP` builds what stands in its activation's place."""

    op: ClassVar[SwiGLU]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, gate_and_up: Tensor) -> Tensor:
        return type(self).op(gate_and_up)


def activation_of(op: SwiGLU) -> type[MegatronModule]:
    """The class of an implementation: Megatron builds activations of nothing but its configuration."""
    return type("SwiGLUActivation", (_Activation,), {"op": staticmethod(op)})
