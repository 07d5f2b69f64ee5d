"""Runs that are dry-run, and the reports of their ranks, which `test_dryrun.py` holds to formulas and to real ranks, and the
laboratory's `test_agreement.py` to all that plans predict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.model import LatentAttentionConfig, ModelConfig, MoEConfig, MultiTokenConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.residual_ngrams.config import ResidualNgramsConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from pretrain.config.context_ways import WAYS
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from tests.deadline import launch_within
from tests.rotation import in_rotation, named_in_rotation

WORLD = 64
MEMORY = UltraMemV2Config(num_keys=64, value_dim=128, pre_value_dim=64, top_k=16, sharing=SharingConfig("block", 2))
SPLIT = RunConfig(
    model=ModelConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        ffn_hidden_size=512,
        vocab_size=1024,
        tied_embeddings=False,
        memory=MEMORY,
    ),
    parallel=ParallelConfig(tensor=2, pipeline=2, memory=16),
    train=TrainConfig(
        sequence_length=512, micro_batch_size=1, global_batch_size=32, precision="bf16", recompute="full"
    ),
)
# With half of the tokens a tenth of the peak is what streams of a GPU keep from each other.
LONGER = replace(SPLIT, train=replace(SPLIT.train, sequence_length=1024))
INTERLEAVED = replace(
    SPLIT,
    model=replace(SPLIT.model, memory=replace(MEMORY, sharing=SharingConfig(), key_balance_weight=0.1)),
    parallel=ParallelConfig(pipeline=2, virtual_pipeline=2),
    train=replace(SPLIT.train, recompute="none", global_batch_size=128, micro_batch_size=2),
)
DENSE = replace(
    SPLIT,
    model=replace(SPLIT.model, memory=None, tied_embeddings=True),
    parallel=ParallelConfig(pipeline=2),
    train=replace(SPLIT.train, recompute="none", global_batch_size=64),
)
CUT = {
    way: replace(
        DENSE,
        parallel=ParallelConfig(pipeline=2, context=4, context_attention=way),
        train=replace(DENSE.train, sequence_length=2048, global_batch_size=16),
    )
    for way in WAYS
}
PARTS = {layers: replace(SPLIT, optimizer=replace(SPLIT.optimizer, trained_layers=layers)) for layers in ((1,), (4,))}
"""Training of one of two layers that share a table: the first stage's lower one, or the last stage's upper one."""
TRAINED = {f"layers {layers}": config for layers, config in PARTS.items()}
LATENTS = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        latent_attention=LatentAttentionConfig(latent_dim=64, rotary_dim=16),
        memory=MoveConfig(num_slots=2, vocab_size=1024, value_dim=64, num_gate_heads=8, mixed_into="latents"),
    ),
    train=replace(SPLIT.train, recompute="none"),
)
INSERTED = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        num_layers=6,
        memory=MidusConfig(num_heads=8, value_dim=32, placement=PlacementConfig(blocks=(2, 5))),
    ),
    parallel=ParallelConfig(tensor=2, pipeline=2, memory=4),
    train=replace(SPLIT.train, recompute="none"),
    optimizer=OptimizerConfig(trained_layers=(3, 6)),
)
"""Two blocks go forward alone; of the others two are trained, and two pass gradients on."""
QUERIES_TOO = replace(
    LATENTS,
    model=replace(LATENTS.model, latent_attention=LatentAttentionConfig(64, 16, query_latent_dim=96)),
)
PARTLY_TRAINED = replace(
    QUERIES_TOO,
    model=replace(QUERIES_TOO.model, memory=LaveConfig(vocab_size=1024, value_dim=64, num_gate_heads=8)),
    optimizer=OptimizerConfig(trained_layers=(2, 4)),
)
"""One block with its memory goes forward alone, and one passes gradients on; latents are projected once more for values."""
MIXTURE = replace(
    SPLIT,
    model=replace(SPLIT.model, memory=None, moe=MoEConfig(num_experts=16, top_k=4, expert_ffn_hidden_size=128)),
    parallel=ParallelConfig(tensor=2, pipeline=2, memory=4),
    train=replace(SPLIT.train, recompute="none"),
)
# Tables of many windows.
OFFLOADED = replace(
    SPLIT,
    model=replace(SPLIT.model, memory=replace(MEMORY, num_keys=2048)),
    parallel=replace(SPLIT.parallel, memory_rows=4),
    optimizer=OptimizerConfig(value_offload="cpu"),
)
# Memories that are handed on to later blocks, each read of which unpacks rows and bins of many entries. Tables are
# updated by row, whose sums go over the ranks with other columns.
SKIPPING = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        num_layers=8,
        memory=UltraMemConfig(
            num_keys=64, value_dim=64, top_k=64, key_expansion=2, placement=PlacementConfig(spans="0:1/2:3/4:6")
        ),
    ),
    parallel=ParallelConfig(pipeline=2, memory=8, memory_rows=2),
    optimizer=OptimizerConfig(tables="row_wise"),
)
# Memories of four blocks read with the stream of the first, which every one of them keeps.
QUERIED = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        num_layers=8,
        memory=replace(MEMORY, sharing=SharingConfig(), placement=PlacementConfig(query_group=4)),
    ),
)
# The first experts get a token more than the last ones.
RECOMPUTED_MIXTURE = replace(MIXTURE, model=replace(MIXTURE.model, moe=MoEConfig(24, 4, 128)), train=SPLIT.train)
# Gradients of tables in bf16, which replicas send each other in windows.
READ_TOGETHER = replace(
    SPLIT,
    optimizer=OptimizerConfig(tables="row_wise", table_gradient_dtype="bf16"),
    model=replace(SPLIT.model, memory=TideConfig(vocab_size=1024, value_dim=256, num_tables=12)),
    parallel=ParallelConfig(memory=2),
    train=replace(SPLIT.train, recompute="none", global_batch_size=64),
)
# Feed-forwards that read their up-projections, with the weights of both others whole on every tensor-parallel rank.
UP_PROJECTIONS = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        memory=StemConfig(vocab_size=1024, value_dim=512, placement=PlacementConfig(blocks=(1, 2, 3))),
    ),
    train=replace(SPLIT.train, recompute="none"),
)
# Heads choose by their values, on the ranks that have them, from tables of their layers.
CHOSEN_ROWS = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        num_query_groups=4,
        memory=MomeConfig(vocab_size=1024, value_dim=32, num_heads=4, num_slots=6, router_input="value"),
    ),
    train=replace(SPLIT.train, recompute="none"),
)
# Rows with signs, which all blocks of a chunk add.
SUMMED_ROWS = replace(
    READ_TOGETHER,
    model=replace(
        SPLIT.model,
        memory=ResidualNgramsConfig(
            value_dim=192, address=NgramAddressConfig(rules="xor", max_order=3, num_rows=4096, signs="hashed")
        ),
    ),
)
# Beside values that every block mixes by itself.
SUMMED_AND_MIXED = replace(
    SUMMED_ROWS,
    model=replace(
        SUMMED_ROWS.model,
        memory=LaveConfig(vocab_size=1024, value_dim=256, num_gate_heads=8),
        second_memory=SUMMED_ROWS.model.memory,
    ),
)
# Hidden states look back across the cuts of both axes, which no other model's do.
LOOKING_BACK = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        memory=EngramConfig(vocab_size=1024, value_dim=16, rows_per_head=512, placement=PlacementConfig(every=2)),
    ),
    parallel=ParallelConfig(tensor=2, context=2, memory=4),
    train=replace(SPLIT.train, recompute="none"),
)
# Two families, both in every stage.
TWO_FAMILIES = replace(
    LOOKING_BACK,
    model=replace(
        SPLIT.model,
        memory=replace(MEMORY, sharing=SharingConfig(), placement=PlacementConfig(blocks=(1, 3))),
        second_memory=EngramConfig(
            vocab_size=1024, value_dim=16, rows_per_head=512, placement=PlacementConfig(blocks=(0, 2))
        ),
    ),
    # What streams of a GPU keep from each other is a tenth of a peak of 512 tokens.
    train=replace(LOOKING_BACK.train, sequence_length=2048),
)
# Two families in every block, one in attention.
IN_ONE_BLOCK = replace(
    SPLIT, model=replace(SPLIT.model, second_memory=LaveConfig(vocab_size=1024, value_dim=256, num_gate_heads=8))
)
# Tables in files: rows of two steps are on the device.
IN_FILES = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        memory=EngramConfig(vocab_size=1024, value_dim=32, rows_per_head=4096, placement=PlacementConfig(every=2)),
    ),
    parallel=ParallelConfig(tensor=2, pipeline=2, memory=32),
    train=replace(SPLIT.train, global_batch_size=64, micro_batch_size=2, recompute="none"),
    optimizer=OptimizerConfig(
        tables="row_wise", table_gradients="rows", value_weight_decay=0.0, table_folder="/nowhere"
    ),
)
# Those of n-grams alone, of two families.
PARTLY_IN_FILES = replace(
    IN_FILES,
    model=replace(
        IN_FILES.model,
        memory=replace(MEMORY, sharing=SharingConfig(), placement=PlacementConfig(blocks=(1, 3))),
        second_memory=replace(IN_FILES.model.memory, placement=PlacementConfig(blocks=(0, 2))),
    ),
)
FILED = {
    name: replace(
        whole,
        parallel=replace(whole.parallel, memory=32 // num_replicas),
        optimizer=replace(whole.optimizer, tables_every=every),
    )
    for name, whole, num_replicas, every in (
        ("one family", IN_FILES, 1, 1),
        ("replicas", IN_FILES, 4, 1),
        ("replicas, every third step", IN_FILES, 4, 3),
        ("one of two families", PARTLY_IN_FILES, 1, 1),
    )
}
# A bank whose gradients are rows, with a copy on both stages, of which one has one reader and the other two.
COPIES_OF_ROWS = replace(
    SPLIT,
    model=replace(
        SPLIT.model,
        memory=MoveConfig(
            num_slots=2, vocab_size=32_768, value_dim=256, num_gate_heads=8, placement=PlacementConfig(blocks=(0, 2, 3))
        ),
    ),
    parallel=ParallelConfig(tensor=2, pipeline=2, memory=8),
    optimizer=OptimizerConfig(tables="row_wise", table_gradients="rows"),
    train=replace(SPLIT.train, recompute="none"),
)
SELECTIVE = replace(CUT["gather"], train=replace(CUT["gather"].train, recompute="selective"))
# Two microbatches, which fill two stages.
FILLED = replace(DENSE, parallel=ParallelConfig(tensor=2, pipeline=2), train=replace(DENSE.train, global_batch_size=32))
# Four, of which the stages have no more than two on their way at once.
AHEAD = replace(
    FILLED,
    model=replace(DENSE.model, multi_token_prediction=MultiTokenConfig(depth=2)),
    train=replace(DENSE.train, global_batch_size=64),
)
# Several residual streams: what blocks keep, and what stages send.
STREAMS = {
    f"streams, {kind}": replace(
        FILLED, model=replace(DENSE.model, residual_streams=ResidualStreamsConfig(kind=kind, rank=32))
    )
    for kind in ("mhc", "single_pass", "gated", "plain")
}
STREAMS["streams, recomputed"] = replace(
    STREAMS["streams, single_pass"],
    parallel=INTERLEAVED.parallel,
    train=replace(INTERLEAVED.train, recompute="full"),
)
STREAMS["streams, plain, recomputed"] = replace(STREAMS["streams, recomputed"], model=STREAMS["streams, plain"].model)
STREAMS["streams, mixed again"] = replace(
    STREAMS["streams, recomputed"],
    model=replace(STREAMS["streams, single_pass"].model, num_layers=8),
    train=replace(INTERLEAVED.train, recompute_streams=2),
)
STREAMS["streams, looking back"] = replace(
    LOOKING_BACK, model=replace(LOOKING_BACK.model, residual_streams=ResidualStreamsConfig())
)
_IN_TURN = {
    **STREAMS,
    "further tokens": AHEAD,
    "further tokens, context": replace(
        CUT["ring"], model=AHEAD.model, train=replace(CUT["ring"].train, recompute="selective")
    ),
    "interleaved": INTERLEAVED,
    "dense": DENSE,
    "mixture": MIXTURE,
    "selective": SELECTIVE,
    "latents": LATENTS,
    "inserted": INSERTED,
    "skipping": SKIPPING,
    "mixture, recomputed": RECOMPUTED_MIXTURE,
    "read together": READ_TOGETHER,
    "read together, recomputed": replace(
        READ_TOGETHER,
        parallel=ParallelConfig(pipeline=2, virtual_pipeline=2, memory=2),
        train=replace(READ_TOGETHER.train, recompute="full", global_batch_size=256),
    ),
    "summed rows": SUMMED_ROWS,
    "summed rows, and values": SUMMED_AND_MIXED,
    "up-projections": UP_PROJECTIONS,
    "up-projections, recomputed": replace(UP_PROJECTIONS, train=SPLIT.train),
    "chosen rows": CHOSEN_ROWS,
    "chosen rows, one of each, recomputed, more ranks than heads": replace(
        CHOSEN_ROWS,
        model=replace(
            CHOSEN_ROWS.model,
            num_query_groups=1,
            memory=replace(CHOSEN_ROWS.model.memory, num_heads=1, active_slots=1, one_table=True),
        ),
        train=SPLIT.train,
    ),
    "looking back": LOOKING_BACK,
    "two families": TWO_FAMILIES,
    "two families, recomputed": replace(
        TWO_FAMILIES, parallel=ParallelConfig(tensor=2, pipeline=2, memory=4), train=SPLIT.train
    ),
    "two families, in one block": IN_ONE_BLOCK,
    "two families, in one block, cut": replace(IN_ONE_BLOCK, parallel=CUT["ring"].parallel, train=CUT["ring"].train),
    "latents, of queries too": QUERIES_TOO,
    "latents, partly trained": PARTLY_TRAINED,
}
# Coefficients of many columns, of which a rank needs its own alone.
MANY_COLUMNS = replace(
    SPLIT,
    parallel=ParallelConfig(memory=64, memory_rows=2),
    train=replace(SPLIT.train, recompute="none", global_batch_size=128),
)
CONFIGS = {
    # Tests ask for these by name, beside what plans predict of each.
    "split": LONGER,
    "offloaded": OFFLOADED,
    "many columns": MANY_COLUMNS,
    **CUT,
    # No other case projects latents again.
    "latents, partly trained, recomputed": replace(PARTLY_TRAINED, train=SPLIT.train),
    **named_in_rotation(_IN_TURN, parts=4),
}
REAL = replace(
    SPLIT,
    parallel=ParallelConfig(memory=2),
    train=replace(SPLIT.train, recompute="none", global_batch_size=4, micro_batch_size=2),
)
ALONE = replace(
    SPLIT, parallel=ParallelConfig(memory=8), train=replace(SPLIT.train, recompute="none", global_batch_size=8)
)
OF_EXPERTS = replace(MIXTURE, parallel=ParallelConfig(memory=4), train=ALONE.train)
COLUMNS = replace(ALONE, model=replace(ALONE.model, memory=replace(MEMORY, sharing=SharingConfig())))
LAUNCHED = {
    "dense": replace(ALONE, parallel=ParallelConfig(), model=replace(ALONE.model, memory=None)),
    "memory": COLUMNS,
    "memory by rows and columns": replace(COLUMNS, parallel=replace(ALONE.parallel, memory_rows=2)),
    "mixture": OF_EXPERTS,
    "larger mixture": replace(OF_EXPERTS, model=replace(OF_EXPERTS.model, moe=MoEConfig(32, 4, 128))),
}
_STREAMS = {kind: ResidualStreamsConfig(kind=kind, rank=32) for kind in ("mhc", "single_pass", "gated", "plain")}
LAUNCHED_STREAMS = {
    kind: replace(LAUNCHED["dense"], model=replace(LAUNCHED["dense"].model, residual_streams=streams))
    for kind, streams in named_in_rotation(
        _STREAMS | {"static": ResidualStreamsConfig(kind="plain", dynamic=False)}
    ).items()
}
ACROSS_RANKS = {
    (way, size): replace(
        LAUNCHED["dense"],
        parallel=ParallelConfig(context=size, context_attention=way),
        train=replace(ALONE.train, global_batch_size=8 // size),
    )
    for way, size in in_rotation([("gather", 2), ("heads", 4), ("ring", 2), ("ring", 8)], parts=2)
}


def launches_of_block(config: RunConfig, world: int, rank: int = 0) -> tuple[float, float]:
    """Kernels of one block for one microbatch on a rank, as on a GPU, forward and backward: by a block and a microbatch
    more, and by a forward pass more.
    """
    from pretrain.planning.dryrun.rank import dry_run

    def of_all(num_layers: int, num_microbatches: int, recompute: Any) -> int:
        batch = num_microbatches * config.train.global_batch_size
        train = replace(config.train, global_batch_size=batch, recompute=recompute)
        model = replace(config.model, num_layers=num_layers)
        (report,) = dry_run(replace(config, model=model, train=train), world, [rank], as_gpu=True)
        return int(report.num_kernels)

    two = of_all(2, 2, "none")
    both = two - of_all(1, 2, "none") - of_all(2, 1, "none") + of_all(1, 1, "none")
    # Two blocks go forward once more for each of two microbatches.
    forward = (of_all(2, 2, "full") - two) / 4
    return forward, both - forward


def of_all_stages(config: RunConfig, world: int, *, as_gpu: bool) -> list[Any]:
    from pretrain.planning.dryrun.rank import dry_run, first_ranks_of_stages

    return list(dry_run(config, world, first_ranks_of_stages(config, world), as_gpu=as_gpu))


RUN = CONFIGS | TRAINED | {"queried": QUERIED}
_TOGETHER = 10
"""Runs of one fork. The first one takes three times as long as the others, of which PyTorch knows most shapes by then."""


class Reports(dict[str, list[Any]]):
    """Reports of the first ranks of all stages of a configuration, run with some of its neighbours when it is first asked
    for, in a fork."""

    def __init__(self, names: Iterable[str] = RUN) -> None:
        """`names` are those that will be asked for, of `RUN`."""
        super().__init__()
        self._names = list(names)

    def __missing__(self, name: str) -> list[Any]:
        if name in RUN:
            place = self._names.index(name) // _TOGETHER * _TOGETHER
            together = self._names[place : place + _TOGETHER]
            (found,) = launch_within(
                lambda: [of_all_stages(RUN[each], WORLD, as_gpu=True) for each in together],
                1,
                timeout_s=280,
                num_threads=1,
            )
            self.update(zip(together, found, strict=True))
            return self[name]

        def main() -> list[Any]:
            if name == "launches":
                # The last rank has tokens before both of its slices of a sequence.
                across = [launches_of_block(config, 8, rank=7) for config in ACROSS_RANKS.values()]
                with patch("parallel.layout.MEETING_RANKS", 8):
                    meeting = launches_of_block(LAUNCHED["memory by rows and columns"], 8)
                return [meeting, *(launches_of_block(config, 8) for config in LAUNCHED.values()), *across]
            if name == "launches of streams":
                return [launches_of_block(config, 8) for config in LAUNCHED_STREAMS.values()]
            assert name == "real", name
            # Beside ranks on the CPU.
            return of_all_stages(REAL, 2, as_gpu=False)

        (self[name],) = launch_within(main, 1, timeout_s=280, num_threads=1)
        return self[name]
