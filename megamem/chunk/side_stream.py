"""Running the memory of a block beside its feed-forward, on a CUDA stream of its own.

The two branches need nothing of each other, and the memory of split tables mostly waits for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megamem.chunk.inputs import Inputs

HIGH_PRIORITY = -1
"""Priority of a CUDA stream whose kernels' blocks are placed before those of other streams that wait."""


class SideStream:
    """Starts a branch of a block and hands out what joins it.

    Backward runs on the streams of forward: autograd makes the streams wait for each other wherever a gradient passes
    from one to the other, and the caller's stream for all of them at the end.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """
        Args:
            stream: the stream of branches; None: they run on the caller's stream, when they are joined.
        """
        self._stream = stream

    def start(self, branch: Callable[[Tensor, Inputs], Tensor], hidden: Tensor, inputs: Inputs) -> Callable[[], Tensor]:
        """Start `branch(hidden, inputs)`.

        Args:
            branch: reads tensors that the caller's stream has written before.
            hidden: its input, allocated on the caller's stream.
            inputs: the tokens behind it, allocated there too.

        Returns:
            Function to call once, on the caller's stream: it waits there (not on the host) and returns the output.
        """
        side = self._stream
        if side is None:
            return lambda: branch(hidden, inputs)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = branch(hidden, inputs)
        # Their memory may not be used again before the branch has read it, also in backward.
        hidden.record_stream(side)
        inputs.record_stream(side)

        def join() -> Tensor:
            caller = torch.cuda.current_stream()
            caller.wait_stream(side)
            out.record_stream(caller)
            return out

        return join
