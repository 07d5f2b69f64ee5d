"""Ranks share the writing of a checkpoint, and the reading of it for damage, by bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_runs import SHARED, on, tiny_run

from pretrain.checkpoint import newest
from pretrain.checkpoint.folder import STATE_FILE, read_state
from pretrain.checkpoint.run_entries import load_weights
from pretrain.checkpoint.shared_check import damage_seen_by_ranks

COPIED = replace(SHARED, checkpoint=replace(SHARED.checkpoint, weights_copy=True, writer_threads=1))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


LAYOUTS = {
    "data 4": on(COPIED, micro_batch_size=1),
    "tensor 2": on(COPIED, micro_batch_size=1, tensor=2),
    "memory 2": on(COPIED, micro_batch_size=1, memory=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_write_about_the_same_bytes(run_ranks: Any, tmp_path: Path, layout: str) -> None:
    """Tables and backbone are held by several ranks, and written by all of them."""

    def main() -> None:
        with tiny_run(LAYOUTS[layout]) as run:
            run.save(tmp_path)

    run_ranks(main, 4)
    (folder,) = tmp_path.iterdir()
    of_rank = [sum(file.stat().st_size for file in folder.glob(f"__{rank}_*.distcp")) for rank in range(4)]
    assert max(of_rank) < 1.25 * sum(of_rank) / 4


def test_every_file_is_read_by_one_rank_and_all_hear_of_the_damage(run_ranks: Any, tmp_path: Path) -> None:
    def main() -> tuple[list[str], list[str], list[str]]:
        config = on(SHARED, micro_batch_size=1)
        with tiny_run(config) as run:
            path = run.save(tmp_path)
        saved = read_state(path)
        read: list[str] = []
        record = newest.record

        def noting(file: Path, on_bytes: Any = None) -> Any:
            read.append(file.name)
            return record(file, on_bytes)

        newest.record = noting
        whole = damage_seen_by_ranks(saved)
        dist.barrier()
        if dist.get_rank() == 2:
            for name in ("__0_0.distcp", "__3_2.distcp", "common.pt"):
                flip(path / name)
        dist.barrier()
        newest.record = record
        return whole, read, damage_seen_by_ranks(saved)

    results = run_ranks(main, 4)
    (folder,) = tmp_path.iterdir()
    assert [whole for whole, _, _ in results] == [[]] * 4
    names = sorted(name for _, read, _ in results for name in read)
    assert names == sorted(file.name for file in folder.iterdir() if file.name != STATE_FILE)
    for _, _, damage in results:
        found = [problem.split(" has other contents")[0] for problem in damage]
        assert found == ["__0_0.distcp", "__3_2.distcp", "common.pt"]


def test_weights_are_loaded_without_the_moments(run_ranks: Any, tmp_path: Path) -> None:
    """The moments are nonsense here, in files of their own, and would be no tensors."""

    def main() -> list[str]:
        config = replace(SHARED, train=replace(SHARED.train, precision="bf16"))
        with tiny_run(config) as run:
            run.train(2)
            path = run.save(tmp_path)
            expected = {name: t.clone() for name, t in (*run.bare[0].named_parameters(), *run.bare[0].named_buffers())}
        for file in (path / "__0_2.distcp", path / "__0_3.distcp"):
            file.write_bytes(b"x" * file.stat().st_size)
        with tiny_run(replace(config, seed=99)) as run:
            load_weights(path, run.bare)
            actual = dict((*run.bare[0].named_parameters(), *run.bare[0].named_buffers()))
            assert {t.dtype for t in run.bare[0].parameters()} == {torch.bfloat16}
            return [name for name in expected if not torch.equal(actual[name], expected[name])]

    assert run_ranks(main, 1) == [[]]
