"""Bytes that updates of tables by row and the loss move on a GPU, as plans count them and as operations do that are dry-run
as on one.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.linear_memory.config import LinearConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.sharing import SharingConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.planning.bytes.launches import LAUNCHES_ADDITION, launches_of
from pretrain.planning.bytes.row_bytes import scaled_bytes
from pretrain.planning.counts.pipeline_stages import stages_of
from pretrain.planning.seconds.update_seconds import table_step_bytes
from tests.deadline import launch_within

UPDATES = ("pretrain/engine/tables/row_wise.py", "kernels/row_squares/", "kernels/row_update/")
"""Files whose operations update tables by row."""
MEMORIES: dict[str, MemoryConfig] = {
    "Tucker cores": UltraMemV2Config(num_keys=1024, value_dim=128, pre_value_dim=64, top_k=128),
    "product keys": MemoryPlusConfig(num_keys=1024, value_dim=128, num_heads=2, top_k=32),
    "short lists": LinearConfig(num_rows=2048, value_dim=256, num_heads=2, key_dim=64, top_k=32),
    "long lists": LinearConfig(num_rows=8192, value_dim=256, num_heads=2, key_dim=64, top_k=32),
}
TOKENS = 2 * 4096


def config_of(memory: MemoryConfig) -> RunConfig:
    model = ModelConfig(
        num_layers=1, hidden_size=256, num_attention_heads=8, ffn_hidden_size=512, vocab_size=1024, memory=memory
    )
    train = TrainConfig(sequence_length=4096, micro_batch_size=2, global_batch_size=2, precision="bf16")
    optimizer = OptimizerConfig(tables="row_wise")
    return RunConfig(model=model, parallel=ParallelConfig(), train=train, optimizer=optimizer)


@pytest.mark.parametrize("name", ["short lists", "long lists"])
def test_a_plan_charges_what_an_update_by_row_moves(name: str) -> None:
    config = config_of(MEMORIES[name])

    def main() -> int:
        from lab.stand_in.watched import watched_run

        (report,) = watched_run(config, 1, [0], count_moved=True)
        return sum(num for line, num in report.moved.items() if line.startswith(UPDATES))

    (moved,) = launch_within(main, 1, timeout_s=120, num_threads=1)
    (stage,) = stages_of(config)
    assert table_step_bytes(config) * stage.table_elements == pytest.approx(moved, rel=0.02)


@pytest.mark.parametrize("name", ["Tucker cores", "rows of tokens", "product keys"])
def test_a_plan_charges_what_products_with_scales_move(name: str) -> None:
    """A weight decay is that of a scale per table; without one nothing is multiplied."""
    tide = TideConfig(vocab_size=1024, value_dim=256, num_tables=3)
    config = config_of(MEMORIES.get(name, tide))
    config = replace(config, optimizer=replace(config.optimizer, table_gradients="rows", value_weight_decay=0.1))
    still = replace(config, optimizer=replace(config.optimizer, value_weight_decay=0.0))

    def main() -> list[tuple[int, int]]:
        from lab.stand_in.watched import watched_run

        found = []
        for each in (config, still):
            (report,) = watched_run(each, 1, [0], count_moved=True)
            moved = sum(num for line, num in report.moved.items() if line.startswith("kernels/common/table_scale.py"))
            found.append((moved, report.counted.num_kernels))
        return found

    ((moved, launched), (nothing, fewer)) = launch_within(main, 1, timeout_s=120, num_threads=1)[0]
    memory = config.model.memories[0]
    assert sum(scaled_bytes(config, memory, TOKENS, backward=way) for way in (False, True)) == moved > 0
    assert scaled_bytes(still, memory, TOKENS, backward=False) == nothing == 0
    (stage,) = stages_of(config)
    plans = [sum(launches_of(each, stage, stage.blocks, way) for way in (0, 1)) for each in (config, still)]
    # Gathers, and the factors of updates.
    assert launched - fewer == plans[0] - plans[1] + len(memory.tables)


@pytest.mark.parametrize("rows", [False, True], ids=["dense gradients", "rows that were read"])
def test_a_plan_counts_the_launches_that_lookups_share(rows: bool) -> None:
    """Four layers read two banks, and each bank's lookups are sorted and added up as one."""
    memory = replace(MEMORIES["Tucker cores"], sharing=SharingConfig(pattern="block", group=2))
    config = config_of(MEMORIES["Tucker cores"])
    config = replace(
        config,
        model=replace(config.model, num_layers=4, memory=memory),
        optimizer=replace(config.optimizer, table_gradients="rows" if rows else "dense"),
    )

    def main() -> list[int]:
        from pretrain.planning.dryrun.rank import dry_run

        found = []
        for most in (1 << 25, 1):
            with patch("kernels.common.joined_lookups.MOST_JOINED_ENTRIES", most):
                (report,) = dry_run(config, 1, [0], as_gpu=True)
                found.append(report.num_kernels)
        return found

    joined, each = launch_within(main, 1, timeout_s=120, num_threads=1)[0]
    (stage,) = stages_of(config)
    plan = launches_of(config, stage, stage.blocks, 1)
    with patch("pretrain.planning.bytes.row_bytes.MOST_JOINED_ENTRIES", 1):
        more = launches_of(config, stage, stage.blocks, 1) - plan
    assert more == 2 * LAUNCHES_ADDITION
    # Ids, coefficients and vectors of two tables are put side by side.
    assert each - joined == pytest.approx(more - 2 * 5, rel=0.1)


def test_a_loss_in_chunks_reads_its_logits_once_forward_and_writes_them_once_in_backward() -> None:
    """Chunks of 3,000 tokens leave a rest; nothing of their size passes but products and the two kernels."""
    config = config_of(MEMORIES["short lists"])
    config = replace(config, train=replace(config.train, loss_chunk_tokens=3000))

    def main() -> dict[str, int]:
        from lab.stand_in.watched import watched_run

        (report,) = watched_run(config, 1, [0], count_moved=True)
        return dict(report.moved)

    (moved,) = launch_within(main, 1, timeout_s=120, num_threads=1)
    ids = config.model.vocab_size
    assert ids is not None

    def of(file: str) -> int:
        return sum(num for line, num in moved.items() if line.startswith(file))

    # Places are of 8 bytes, and a token's largest logit, total, target or gradient of 4.
    assert of("kernels/softmax_sums/") == TOKENS * (2 * ids + 20)
    assert of("kernels/softmax_gradient/") == TOKENS * (4 * ids + 20)
    # Gradients of hidden states and of the weight take less than widening the logits once.
    assert of("megamem/backbone/chunked_loss.py") < 6 * TOKENS * ids
