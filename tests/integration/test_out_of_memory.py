"""A rank that runs out of memory says what its memory goes to, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import Megamem

import pretrain.train.loop as loop
from pretrain.config.stages import load_config
from pretrain.train.health.out_of_memory import is_out_of_memory, out_of_memory_explained

ON_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 3.00 GiB.\nGPU 0 has a total capacity of 139 GiB"
)
ON_HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried")


def fails_with(error: BaseException) -> Callable[[], None]:
    """The second rank's first step raises it."""
    step = loop.train_step

    def failing(*arguments: Any, **named: Any) -> Any:
        if dist.get_rank() == 1:
            raise error
        return step(*arguments, **named)

    def before() -> None:
        loop.train_step = failing

    return before


@pytest.mark.parametrize("error", [ON_GPU, ON_HOST], ids=["GPU", "host"])
def test_a_run_that_runs_out_of_memory_says_what_to_change(
    megamem: Megamem, config_file: Path, tmp_path: Path, error: BaseException
) -> None:
    result = megamem("train", config_file, "--nproc", 2, "--run-dir", tmp_path / "run", before=fails_with(error))
    assert result.code == 2, result.output
    said = " ".join(result.output.split())
    assert f"a rank ran out of memory ({str(error).splitlines()[0]}" in said
    # 24,576 elements of tables, in fp32.
    for part in (" tables 9.83e-05 GB", "table gradients 9.83e-05 GB", "optimizer state of tables", "logits and loss"):
        assert part in said
    for fix in ("train.recompute=full would save about", "train.micro_batch_size=2 would", "parallel.memory=2 would"):
        assert fix in said
    # Two ranks cannot be split four ways.
    assert "parallel.tensor=4" not in said
    assert "Traceback" not in result.output


def test_other_errors_stay_what_they_are(config_file: Path) -> None:
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match=r"^shapes$"), out_of_memory_explained(load_config(config_file), 2):
        raise RuntimeError("shapes")
