"""Check a checkpoint's contents against their hashes, by all ranks together: each file is read by one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from pretrain.checkpoint.folder import SavedState
from pretrain.checkpoint.hashes import shares
from pretrain.checkpoint.newest import damaged_files
from pretrain.errors import CheckpointError


def damage_seen_by_ranks(saved: SavedState, names: Iterable[str] | None = None) -> list[str]:
    """Damage in the contents of a checkpoint, or of some of its files, in words. Collective."""
    chosen = saved.files if names is None else {name: saved.files[name] for name in names}
    mine = shares(chosen, dist.get_world_size())[dist.get_rank()]
    try:
        found = damaged_files(saved.path, mine)
    except CheckpointError as error:
        found = [str(error)]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, found)
    return sorted({problem for problems in of_all for problem in problems})
