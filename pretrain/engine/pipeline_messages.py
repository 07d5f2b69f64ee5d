"""Messages between pipeline stages where the first stages have no backward pass."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor


class WithoutGradients(P2PCommunicator):
    """Messages of a stage that waits for no gradient of its output, as nothing in it or before it is trained.

    The stage behind it has none to send: its input has no gradient, and Megatron leaves out a message without a tensor.
    """

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> list[None]:
        """No gradients, without waiting for them."""
        return [None] * len(tensor_shapes)

    def send_forward_recv_backward(
        self, output_tensors: list[Tensor], tensor_shapes: Any, is_last_stage: bool
    ) -> list[None]:
        """Send outputs on; no gradients come for them."""
        self.send_forward(output_tensors, is_last_stage)
        return [None] * len(output_tensors)
