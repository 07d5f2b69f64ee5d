"""Memory that a rank needs of its machine to build and save its part of a large bank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from kernels.select import select_kernels
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.initialisation.distributions import Normal
from megamem.initialisation.random_fill import fill
from megamem.parameters.declaration import Copy
from megamem.placement.sharing import BankSpec
from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from parallel.sharded_bank import make_bank
from pretrain.checkpoint.saver import Saver
from pretrain.config.schema import RunConfig
from pretrain.state import RunState
from tests.rotation import in_turn

RANKS = 8
MIB = 2**20
BANK_BYTES = 1024 * MIB
MEMORY = UltraMemV2Config(num_keys=1024, value_dim=192, pre_value_dim=64)
"""1024^2 rows of 256 fp32 columns."""

# Memory that does not grow with the bank: the temporaries of the fill, a few int64 and float64 tensors of 2^20
# elements; and what Python and PyTorch load and keep when they first write a checkpoint. Measured: 130 to 160 MiB,
# with a part of 32 MiB as with one of 256 MiB.
CONSTANT_BYTES = 160 * MIB


def kib(field: str) -> int:
    """A figure of this process by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def peak_of_a_rank(folder: Path) -> tuple[int, int]:
    """Bytes of this rank's tables, and how far its resident memory grew while it built and saved them."""
    with cuda_on_cpu():
        sizes = ParallelSizes(memory=RANKS)
        groups = initialise_groups(sizes, device=torch.device("cpu"), timeout_minutes=5, seed=1)
        # Sets the peak back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = kib("VmRSS")
        bank = make_bank(
            BankSpec(0, MEMORY.num_keys**2, (0,)),
            MEMORY,
            dtype=torch.float32,
            device=torch.device("cpu"),
            copy=Copy(),
            kernels=select_kernels("auto"),
            groups=groups.megatron,
        )
        entries = bank.sharded_state_dict(prefix="banks.0.")
        for entry in entries.values():
            fill(
                entry.data,
                Normal(0.1),
                seed=1,
                name=entry.key,
                global_shape=entry.global_shape,
                offset=entry.global_offset,
            )
        Saver().start(RunConfig(), RunState(step=1), entries, folder)
        dist.barrier()
        return sum(table.nbytes for table in bank.parameters()), (kib("VmHWM") - before) * 1024


@in_turn(1)
def test_a_rank_builds_and_saves_its_part_within_one_and_a_half_times_its_size(run_ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    ranks = run_ranks(lambda: peak_of_a_rank(folder), RANKS, timeout_s=500)
    for shard_bytes, grown_bytes in ranks:
        assert shard_bytes == BANK_BYTES // RANKS
        # It was really there: not less than the tables, and not the whole bank either.
        assert shard_bytes < grown_bytes < 1.5 * shard_bytes + CONSTANT_BYTES < BANK_BYTES / 2
    entries = FileSystemReader(folder / "step_00000001").read_metadata().state_dict_metadata
    assert {name: tuple(entry.size) for name, entry in entries.items()} == {
        "banks.0.values": (1024**2, 192),
        "banks.0.pre_values": (1024**2, 64),
    }
