"""Agreement of all ranks to stop: a signal may reach some of them and not others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pretrain.run.stop import StopRequest


@dataclass
class AgreedStop:
    """Request to stop, once every rank knows of it: all of them then leave off at the same place.

    Attributes:
        request: made to this rank; None: nobody listens.
        known: every rank knows that one of them was told to stop.
    """

    request: StopRequest | None = None
    known: bool = False

    @property
    def requested(self) -> bool:
        """True if this rank was told to stop."""
        return self.request is not None and self.request.requested

    def ask(self, device: torch.device) -> bool:
        """Ask all ranks whether one was told to stop. Collective, unless it is known."""
        if not self.known:
            requested = torch.tensor(float(self.requested), device=device)
            dist.all_reduce(requested)
            self.known = requested.item() > 0
        return self.known
