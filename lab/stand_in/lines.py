"""Lines of our code that ask for operations, in both passes of a step."""

from __future__ import annotations

from dataclasses import replace

import torch

from pretrain.planning.dryrun.lines import CallSite, calling_line

BACKWARD = "backward of "
"""Begins a place that is named for the line of a forward operation."""


class Lines:
    """Lines that ask for operations; in a backward pass with those of the forward operations."""

    def __init__(self) -> None:
        self._of_nodes: dict[int, CallSite] = {}

    def line(self) -> CallSite:
        """The line that asks now; to be called for every operation."""
        line = calling_line()
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            forward = self._of_nodes.get(node._sequence_nr())
            return line if forward is None else replace(line, through=f"{BACKWARD}{forward.line}")
        if torch.is_grad_enabled():
            # A node has its number before its operation runs.
            self._of_nodes[torch._C._autograd._get_sequence_nr() - 1] = line
        return line
