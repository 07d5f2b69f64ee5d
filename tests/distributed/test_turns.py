"""Work whose result others find is done in turns: rank 0, then the first rank of every machine, then all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from parallel.processes.turns import in_turns
from tests.distributed.conftest import RunRanks

RANKS_PER_MACHINE = 2


@pytest.mark.parametrize(("is_shared", "makers"), [(True, {0}), (False, {0, 2})], ids=["one folder", "one per machine"])
def test_a_file_is_made_once_per_folder(run_ranks: RunRanks, tmp_path: Path, is_shared: bool, makers: set[int]) -> None:
    def main() -> list[tuple[bool, int]]:
        rank = dist.get_rank()
        found = []
        for call in range(3):
            machine = 0 if is_shared else rank // RANKS_PER_MACHINE
            path = tmp_path / f"{machine}-{call}"

            def work(path: Path = path) -> tuple[bool, int]:
                made = not path.exists()
                if made:
                    path.write_text(str(rank))
                return made, int(path.read_text())

            found.append(in_turns(work, is_first_of_machine=rank % RANKS_PER_MACHINE == 0))
        return found

    results = run_ranks(main, 4)
    for call in range(3):
        assert {rank for rank in range(4) if results[rank][call][0]} == makers
        assert [results[rank][call][1] for rank in range(4)] == [0, 0, max(makers), max(makers)]


def test_nobody_waits_alone() -> None:
    assert in_turns(lambda: 7, is_first_of_machine=False) == 7
