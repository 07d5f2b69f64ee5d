"""Work of rank 0 for all ranks: its result and its refusal reach every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.errors import MissingDataError
from pretrain.train.main_rank import done_by_main


def told() -> tuple[object, list[int], str]:
    """Result of work, the ranks that did it here, and what a refusal says."""
    did: list[int] = []

    def work() -> dict[str, int]:
        did.append(dist.get_rank())
        return {"rank": dist.get_rank()}

    def refuse() -> None:
        raise MissingDataError("no such data set", Path("/data/mine"))

    found = done_by_main(work)
    try:
        done_by_main(refuse)
    except MissingDataError as error:
        return found, did, f"{error}: {error.folder}"
    return found, did, "nothing"


def test_all_ranks_are_told_what_rank_0_found(run_ranks: Any) -> None:
    first, second = run_ranks(told, 2)
    assert first == ({"rank": 0}, [0], "no such data set: /data/mine")
    assert second == ({"rank": 0}, [], "no such data set: /data/mine")
