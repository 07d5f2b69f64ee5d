"""Work that rank 0 does for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain.errors import UserError

T = TypeVar("T")


def done_by_main(work: Callable[[], T]) -> T:
    """The result of work that rank 0 does, on every rank. Collective.

    Args:
        work: is done by rank 0 alone; its result can be pickled.

    Raises:
        UserError: the work's own error, on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except UserError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    found, refusal = outcome
    if refusal is not None:
        raise refusal
    result: T = found
    return result
