"""Closed formulas against models that were built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isnan, nan
from types import SimpleNamespace
from typing import Any

import pytest

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.model import LatentAttentionConfig, ModelConfig, MoEConfig, MultiTokenConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.linear_memory.config import LinearConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.ngram_embedding.config import NgramEmbeddingConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.residual_ngrams.config import ResidualNgramsConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.families.value_ngrams.config import ValueNgramsConfig
from megamem.parameters.trained_part import Trained
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from megamem.retrieval.config import TuckerConfig
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.formulas import (
    count_parameters,
    forward_flops_of_block,
    forward_flops_per_token,
    memory_layer_costs,
    training_flops_per_token,
)
from pretrain.planning.counts.residual_streams import end_flops

VOCAB = 300
DENSE = ModelConfig(
    num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, vocab_size=VOCAB
)
MEMORY = UltraMemV2Config(num_keys=12, key_dim=8, value_dim=12, pre_value_dim=4, top_k=6)
GRID: Any = {"num_keys": 12, "key_dim": 8, "top_k": 6, "num_heads": 2}
PRODUCT = MemoryPlusConfig(value_dim=12, **GRID)
LATENT = replace(DENSE, num_query_groups=None, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=4))
LATENTS: Any = {"vocab_size": VOCAB, "value_dim": 12, "num_gate_heads": 4}
HEADS: Any = {"num_heads": 2, "value_dim": 8, "num_slots": 5, "gate_channels": 12}
TOKENS: Any = {"vocab_size": VOCAB, "value_dim": 16, "num_gate_heads": 2}
MOE = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=16)
MODELS = {
    "dense": DENSE,
    "untied, no qk norm, wide heads": replace(DENSE, tied_embeddings=False, qk_norm=False, head_dim=16),
    "biases of queries, keys and values": replace(DENSE, qkv_bias=True),
    "memory": replace(DENSE, memory=MEMORY),
    "memory, block of 2": replace(DENSE, memory=replace(MEMORY, sharing=SharingConfig("block", 2))),
    "memory, ring of 3": replace(DENSE, memory=replace(MEMORY, sharing=SharingConfig("ring", 3))),
    "memory, single query, 2 heads, 1 core, no pre-values": replace(
        DENSE, memory=replace(MEMORY, query="single", num_heads=2, num_cores=1, pre_value_dim=0)
    ),
    "memory, expanded keys": replace(DENSE, memory=replace(MEMORY, key_expansion=3)),
    "memory, expanded keys, projected blocks": replace(
        DENSE, memory=replace(MEMORY, key_expansion=2, value_blocks="projected")
    ),
    "memory, every second block": replace(DENSE, memory=replace(MEMORY, placement=PlacementConfig(every=2))),
    "ultramem": replace(DENSE, memory=UltraMemConfig(num_keys=12, key_dim=8, value_dim=12, top_k=6)),
    "ultramem, queries per head": replace(
        DENSE, memory=UltraMemConfig(num_heads=3, queries_per_head=True, num_keys=12, key_dim=8, value_dim=12, top_k=6)
    ),
    "ultramem, spans": replace(
        DENSE,
        memory=UltraMemConfig(num_keys=12, top_k=6, placement=PlacementConfig(spans="0:2/1:3")),
    ),
    "memory_plus, one table": replace(DENSE, memory=replace(PRODUCT, sharing=SharingConfig("all"))),
    "memory_plus, every option": replace(
        DENSE, memory=replace(PRODUCT, query_norm=False, biases=True, output_gate=True)
    ),
    "memory_plus instead of the ffn": replace(
        DENSE, memory=replace(PRODUCT, placement=PlacementConfig(blocks=(1, 2), position="instead"))
    ),
    "pkm": replace(DENSE, memory=PkmConfig(value_dim=32, **GRID)),
    "pkm, two inserted blocks": replace(
        DENSE,
        memory=PkmConfig(value_dim=32, placement=PlacementConfig(blocks=(1, 3), position="inserted"), **GRID),
    ),
    "ultramem, one inserted block over latents": replace(
        LATENT, memory=UltraMemConfig(num_keys=12, placement=PlacementConfig(blocks=(0,), position="inserted"))
    ),
    "pkm, biases": replace(DENSE, memory=PkmConfig(value_dim=32, biases=True, **GRID)),
    "pkm, projected and gated": replace(
        DENSE, memory=PkmConfig(value_dim=12, value_projection=True, output_gate=True, **GRID)
    ),
    "peer": replace(DENSE, memory=PeerConfig(value_dim=32, **GRID)),
    "linear": replace(DENSE, memory=LinearConfig(num_heads=3, num_rows=50, key_dim=8, top_k=5, value_dim=32)),
    "move": replace(DENSE, memory=MoveConfig(num_slots=3, **TOKENS)),
    "move, ungated": replace(DENSE, memory=MoveConfig(gated_standard_path=False, **TOKENS)),
    "lave, every second block": replace(DENSE, memory=LaveConfig(placement=PlacementConfig(every=2), **TOKENS)),
    "lave, gated": replace(DENSE, memory=LaveConfig(gated_standard_path=True, **TOKENS)),
    "tide": replace(DENSE, memory=TideConfig(vocab_size=VOCAB, value_dim=32, num_tables=3)),
    "move by n-grams": replace(
        DENSE,
        memory=MoveConfig(
            value_dim=16, num_gate_heads=2, address=NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=31)
        ),
    ),
    "tide by n-grams": replace(
        DENSE,
        memory=TideConfig(
            value_dim=32, num_tables=2, address=NgramAddressConfig(rules="xor", max_order=3, num_rows=20)
        ),
    ),
    "ngram embedding": replace(
        DENSE, memory=NgramEmbeddingConfig(value_dim=8, address=NgramAddressConfig(rules="polynomial", num_rows=40))
    ),
    "residual n-grams": replace(
        DENSE,
        memory=ResidualNgramsConfig(
            value_dim=20, address=NgramAddressConfig(rules="xor", max_order=3, num_rows=20, signs="ids")
        ),
    ),
    "lave by n-grams, and residual n-grams": replace(
        DENSE,
        memory=LaveConfig(value_dim=DENSE.query_groups * DENSE.attention_head_dim, num_gate_heads=1),
        second_memory=ResidualNgramsConfig(
            value_dim=20, address=NgramAddressConfig(num_rows=20), placement=PlacementConfig(blocks=(1,))
        ),
    ),
    "residual n-grams without signs, every second block": replace(
        DENSE,
        memory=ResidualNgramsConfig(
            value_dim=32, address=NgramAddressConfig(num_rows=20), placement=PlacementConfig(every=2)
        ),
    ),
    "value n-grams": replace(
        DENSE, memory=ValueNgramsConfig(value_dim=5, address=NgramAddressConfig(max_order=3, num_rows=31))
    ),
    "value n-grams in one head, every second block": replace(
        DENSE,
        memory=ValueNgramsConfig(
            value_dim=4,
            into="one_head",
            gate_bias=True,
            address=NgramAddressConfig(heads_per_order=2, num_rows=31),
            placement=PlacementConfig(every=2),
        ),
    ),
    "stem": replace(DENSE, memory=StemConfig(vocab_size=VOCAB, value_dim=40, placement=PlacementConfig(every=2))),
    "stem in every block": replace(DENSE, memory=StemConfig(vocab_size=VOCAB, value_dim=40)),
    "stem and lave in the same blocks, latents": replace(
        LATENT, memory=StemConfig(vocab_size=VOCAB, value_dim=40), second_memory=LaveConfig(**LATENTS)
    ),
    "mome": replace(DENSE, memory=MomeConfig(vocab_size=VOCAB, **HEADS)),
    "mome of one slot, one table": replace(
        DENSE, memory=MomeConfig(vocab_size=VOCAB, active_slots=1, one_table=True, **HEADS)
    ),
    "mome by n-grams, routed by values, every second block": replace(
        DENSE,
        memory=MomeConfig(
            router_input="value",
            address=NgramAddressConfig(max_order=3, num_rows=31),
            placement=PlacementConfig(every=2),
            **HEADS,
        ),
    ),
    "engram": replace(DENSE, memory=EngramConfig(rows_per_head=31, heads_per_order=2, value_dim=6)),
    "engram, no convolution, no biases": replace(
        DENSE,
        memory=EngramConfig(
            rules="ple",
            max_order=4,
            rows_per_head=31,
            heads_per_order=3,
            conv_kernel=0,
            projection_biases=False,
            placement=PlacementConfig(every=2),
        ),
    ),
    "learned keys and engram": replace(
        DENSE,
        memory=replace(MEMORY, placement=PlacementConfig(blocks=(1, 2))),
        second_memory=EngramConfig(
            rows_per_head=31, heads_per_order=2, value_dim=6, placement=PlacementConfig(blocks=(0, 3))
        ),
    ),
    "engram, then skipping": replace(
        DENSE,
        memory=EngramConfig(rows_per_head=31, heads_per_order=2, value_dim=6, placement=PlacementConfig(blocks=(1,))),
        second_memory=UltraMemConfig(num_keys=12, top_k=6, placement=PlacementConfig(spans="0:2/2:3")),
    ),
    "learned keys and lave in the same blocks": replace(
        DENSE, memory=MEMORY, second_memory=LaveConfig(placement=PlacementConfig(blocks=(0, 3)), **TOKENS)
    ),
    "latents, engram, then move": replace(
        LATENT,
        memory=EngramConfig(rows_per_head=31, heads_per_order=2, value_dim=6, placement=PlacementConfig(blocks=(1,))),
        second_memory=MoveConfig(**LATENTS),
    ),
    "latents": LATENT,
    "latents, no norm, wide heads": replace(LATENT, qk_norm=False, head_dim=16),
    **{
        f"streams, {kind}": replace(DENSE, residual_streams=ResidualStreamsConfig(kind=kind, count=3, rank=10))
        for kind in ("mhc", "single_pass", "gated", "plain")
    },
    "streams, static, in place of a feed-forward": replace(
        DENSE,
        residual_streams=ResidualStreamsConfig(kind="plain", dynamic=False),
        memory=replace(MEMORY, placement=PlacementConfig(blocks=(1,), position="instead")),
    ),
    "streams, engram": replace(
        DENSE,
        residual_streams=ResidualStreamsConfig(),
        memory=EngramConfig(value_dim=8, heads_per_order=2, rows_per_head=29, placement=PlacementConfig(blocks=(1,))),
    ),
    "latents, of queries too": replace(LATENT, latent_attention=LatentAttentionConfig(12, 4, query_latent_dim=20)),
    "latents, of queries too, no norm, wide heads": replace(
        LATENT, qk_norm=False, head_dim=16, latent_attention=LatentAttentionConfig(12, 4, query_latent_dim=20)
    ),
    "latents, no rotary key": replace(LATENT, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=0)),
    "latents, move": replace(LATENT, memory=MoveConfig(num_slots=3, mixed_into="latents", **LATENTS)),
    "latents, move for values alone": replace(LATENT, memory=MoveConfig(**LATENTS)),
    "latents, lave": replace(LATENT, memory=LaveConfig(placement=PlacementConfig(every=2), **LATENTS)),
    "latents, memory": replace(LATENT, memory=MEMORY),
    "tide, no gain": replace(DENSE, memory=TideConfig(vocab_size=VOCAB, value_dim=32, row_gain=False)),
    "midus, two blocks": replace(
        DENSE, memory=MidusConfig(num_heads=4, num_keys=8, value_dim=12, placement=PlacementConfig(blocks=(1, 3)))
    ),
    **{
        f"midus, {query}": replace(
            DENSE,
            memory=MidusConfig(num_heads=4, num_keys=8, query_from=query, placement=PlacementConfig(blocks=(1, 3))),  # type: ignore[arg-type]
        )
        for query in ("stream_and_heads", "projected")
    },
    "midus, layer norm": replace(
        DENSE, memory=MidusConfig(num_heads=4, num_keys=8, placement=PlacementConfig(blocks=(1, 3), norm="layer"))
    ),
    "midus, normalised queries": replace(
        DENSE, memory=MidusConfig(num_heads=4, num_keys=8, query_norm="layer", placement=PlacementConfig(blocks=(1,)))
    ),
    "midus, untied, no qk norm": replace(
        DENSE,
        tied_embeddings=False,
        qk_norm=False,
        num_query_groups=None,
        memory=MidusConfig(num_heads=4, num_keys=9, top_k=3, value_dim=5, placement=PlacementConfig(blocks=(0,))),
    ),
    "moe": replace(DENSE, moe=MOE),
    "moe with memory": replace(DENSE, moe=MOE, memory=MEMORY),
}


@dataclass(frozen=True)
class BuiltModel:
    """Counts on a model that was built.

    Attributes:
        parts: parameters by part.
        products: FLOPs per token of matrix products in a forward pass, but for attention, by PyTorch's own count; nan
        if there was none.
        batched_products: FLOPs per token of batched ones.
        table_bytes: per token, of the rows that the layers looked up.
    """

    parts: dict[str, int]
    products: float
    batched_products: float
    table_bytes: float


def built_models(
    models: Mapping[str, ModelConfig], vocab_size: int, *, fake: bool, forward: Collection[str]
) -> dict[str, BuiltModel]:
    """Count on real modules, whose tensors are fake if they would be large; what a forward pass costs, on those named
    in `forward`.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    from parallel.groups import ParallelSizes, initialise_groups
    from parallel.machine.cpu import cuda_on_cpu
    from parallel.processes.ranks import current_ranks
    from pretrain.engine import build
    from tests.deadline import launch_within

    def main() -> dict[str, BuiltModel]:
        ranks = current_ranks()
        assert ranks is not None
        dist.init_process_group(
            "gloo", init_method=ranks.init_method, rank=0, world_size=1, timeout=timedelta(minutes=2)
        )
        if fake:
            # Fake tensors have no values to draw. This process is a fork that ends here: nothing has to be put back.
            build.initialise = lambda *_, **__: None  # type: ignore[assignment]
        with cuda_on_cpu():
            groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
            counts = {}
            for name, model in models.items():
                with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
                    (chunk,) = build.build_chunks(RunConfig(model=model), groups, vocab_size=vocab_size)
                    passed = _count_forward(chunk) if name in forward else (nan, nan, nan)
                    counts[name] = BuiltModel(_by_part(chunk), *passed)
            return counts

    return launch_within(main, 1, timeout_s=300, num_threads=1)[0]


def _count_forward(chunk: Any) -> tuple[float, float, float]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.zeros(2, 8, dtype=torch.int64)
    num_bytes = 0

    def counted(read: Callable[..., Any], row_bytes: int) -> Callable[..., Any]:
        def count(rows: Any, *arguments: Any) -> Any:
            nonlocal num_bytes
            num_bytes += rows.numel() * row_bytes
            return read(rows, *arguments)

        return count

    for layer in chunk.memory_layers:
        tables = chunk.banks[str(layer.view.bank)].parameters()
        row_bytes = sum(table.shape[1] * table.element_size() for table in tables)
        layer.lookup = SimpleNamespace(
            read=counted(layer.lookup.read, row_bytes), read_heads=counted(layer.lookup.read_heads, row_bytes)
        )
    for together in chunk.read_together:
        (bank,) = {layer.view.bank for layer in chunk.memory_layers if layer.memory.reads_once}
        row_bytes = sum(table.shape[1] * table.element_size() for table in chunk.banks[str(bank)].parameters())
        together.lookup = SimpleNamespace(read=counted(together.lookup.read, row_bytes))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        chunk(ids, torch.arange(8).expand(2, -1), None)
    flops = {str(operation): count / ids.numel() for operation, count in counter.get_flop_counts()["Global"].items()}
    batched = flops.get("aten.bmm", 0.0)
    return flops["aten.mm"] + flops.get("aten.addmm", 0.0), batched, num_bytes / ids.numel()


def check_costs(model: ModelConfig, built: BuiltModel) -> None:
    """The closed formulas are what was counted; what PyTorch does not count are attention, selections and gathers."""
    counts = count_parameters(model)
    assert counts.parts == built.parts
    if isnan(built.products):
        return
    assert built.table_bytes == 4 * counts.read_values
    length = 64
    attention = model.num_layers * 4 * model.num_attention_heads * model.attention_head_dim * (length + 1) / 2
    expected = forward_flops_per_token(model, length) - attention
    rescoring = 0
    if (memory := model.memory) is not None:
        expected -= memory_layer_costs(model).selection_flops + 2 * counts.read_values
        if isinstance(memory, TuckerConfig):
            # The scores of the kept entries are computed once more: S C, and from that the sum with the other S.
            pairs = memory.num_cores * memory.tucker_rank * (memory.tucker_rank + 1)
            rescoring = 2 * model.num_memory_layers * memory.num_heads * memory.top_k * pairs
    if (n := model.num_streams) is not None:
        # Streams are weighed and mixed by products of tokens' own matrices, at a read more than there are sites.
        rescoring += (2 * model.num_layers + 1) * 2 * n * (n + 1) * model.hidden_size
    assert expected <= built.products + built.batched_products <= expected + rescoring


def _by_part(chunk: object) -> dict[str, int]:
    parts = dict.fromkeys(("embedding", "attention", "ffn", "norms", "retrieval", "memory_projections", "tables"), 0)
    for name, parameter in chunk.named_parameters():  # type: ignore[attr-defined]
        part = _part_of(name)
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def _part_of(name: str) -> str:
    if "banks" in name:
        return "tables"
    if name.startswith("multi_token"):
        return "multi_token"
    if "streams." in name or "streams_end" in name:
        return "residual_streams"
    if any(
        part in name
        for part in (
            *("value_proj", "value_bias", "silu_gate", "output_gate"),
            *("gate_proj", "memory.up_proj", "memory.down_proj", "memory.router", "memory.expansion", "shared_read"),
        )
    ):
        return "memory_projections"
    if ".memory." in name:
        return "retrieval"
    if "layernorm" in name:
        return "norms"
    if "embedding" in name or "output_layer" in name:
        return "embedding"
    return "attention" if "self_attention" in name else "ffn"


@pytest.fixture(scope="module")
def built() -> dict[str, BuiltModel]:
    return built_models(MODELS, VOCAB, fake=False, forward=MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_every_cost_is_that_of_the_built_model(name: str, built: dict[str, BuiltModel]) -> None:
    """Parameters by part, operations, and bytes of tables."""
    assert not isnan(built[name].products)
    check_costs(MODELS[name], built[name])


def test_active_parameters_count_the_values_that_a_token_reads() -> None:
    counts = count_parameters(MODELS["memory"])
    assert counts.read_values == DENSE.num_layers * MEMORY.top_k * (MEMORY.value_dim + MEMORY.pre_value_dim)
    assert counts.active == counts.total - counts.tables + counts.read_values
    assert count_parameters(DENSE).active == count_parameters(DENSE).total


def test_active_parameters_leave_out_idle_experts() -> None:
    dense_of_two = replace(DENSE, ffn_hidden_size=2 * 16)
    router = DENSE.num_layers * DENSE.hidden_size * MOE.num_experts
    assert count_parameters(MODELS["moe"]).active == count_parameters(dense_of_two).active + router
    assert forward_flops_per_token(MODELS["moe"], 64) == forward_flops_per_token(dense_of_two, 64) + 2 * router


def test_flops_of_a_product_key_memory() -> None:
    """Queries, keys, sums of candidates, values, and both projections, by hand."""
    model = MODELS["memory_plus, one table"]
    per_layer = 2 * (32 * 4 * 8 + 2 * 2 * 12 * 8 + 2 * 6 * 12 + 2 * 32 * 12) + 2 * 6**2
    assert forward_flops_per_token(model, 64) == forward_flops_per_token(DENSE, 64) + 4 * per_layer


def test_expansion_costs_keys_and_neither_rows_nor_reads() -> None:
    plain, expanded = MODELS["memory"], MODELS["memory, expanded keys"]
    few, many = count_parameters(plain), count_parameters(expanded)
    assert (few.tables, few.read_values, few.memory_projections) == (
        many.tables,
        many.read_values,
        many.memory_projections,
    )
    assert many.retrieval - few.retrieval == 2 * DENSE.num_layers * 2 * 12 * 8 * 2
    projected = count_parameters(MODELS["memory, expanded keys, projected blocks"])
    assert projected.memory_projections - few.memory_projections == DENSE.num_layers * 3 * 12 * 32


def test_bytes_that_selections_read_and_write() -> None:
    """fp32 scores of both sides' keys, of two per key with Tucker cores of rank 2; then of every entry that either
    stage takes, two int64 numbers.
    """
    tucker = memory_layer_costs(MODELS["memory"]).selection_bytes
    assert tucker == DENSE.num_layers * (4 * 2 * 2 * 12 + 2 * 8 * (6 + 6))
    model = MODELS["memory_plus, one table"]
    products = memory_layer_costs(model).selection_bytes
    assert products == model.num_memory_layers * 2 * (4 * 2 * 12 + 2 * 8 * (6 + 6))


def test_flops_of_a_dense_model_are_two_per_weight_and_causal_attention() -> None:
    counts = count_parameters(DENSE)
    weights = counts.attention + counts.ffn + 384 * DENSE.hidden_size
    attention = DENSE.num_layers * 4 * DENSE.hidden_size * (100 + 1) / 2
    assert forward_flops_per_token(DENSE, 100) == 2 * weights + attention
    assert training_flops_per_token(DENSE, 100) == 3 * forward_flops_per_token(DENSE, 100)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_add_up_to_the_forward_pass(name: str) -> None:
    """The output projection and attention count too; backward adds up from the lowest block to the whole model."""
    model = MODELS[name]
    length = 100
    attended = model.num_layers * 4 * model.num_attention_heads * model.attention_head_dim * (length + 1) / 2
    # 300 ids are padded to 384.
    projection = 2.0 * 384 * model.hidden_size
    blocks = sum(forward_flops_of_block(model, block) for block in range(model.num_layers))
    forward = forward_flops_per_token(model, length)
    projection += end_flops(model)
    assert blocks + attended + projection == pytest.approx(forward, rel=1e-12)
    all_layers = tuple(range(1, model.num_layers + 1))
    trained = training_flops_per_token(model, length, Trained(all_layers))
    # The weights' gradient of the output projection alone is left out.
    assert trained == pytest.approx(3 * forward - projection, rel=1e-12)


def test_a_part_of_a_model_is_trained_with_fewer_operations() -> None:
    """Training the third of four blocks takes the gradients of its weights, and those of inputs from there on."""
    forward = forward_flops_per_token(DENSE, 100)
    block, attended = forward_flops_of_block(DENSE, 2), 4 * 32 * 101 / 2
    expected = forward + 2 * 384 * 32 + (2 * block + 2 * attended) + (block + 2 * attended)
    assert training_flops_per_token(DENSE, 100, Trained((3,))) == pytest.approx(expected, rel=1e-12)


def test_a_branch_costs_a_block_a_projection_and_the_output_projection() -> None:
    """FLOPs of each depth by hand, and parameters of the built model."""
    model = replace(DENSE, multi_token_prediction=MultiTokenConfig(depth=2))
    check_costs(model, built_models({"branch": model}, VOCAB, fake=False, forward=())["branch"])
    dense = count_parameters(DENSE)
    block = (dense.attention + dense.ffn) // DENSE.num_layers
    flops = 2 * (block + 2 * 32 * 32 + 384 * 32) + 4 * 32 * 101 / 2
    assert forward_flops_per_token(model, 100) == forward_flops_per_token(DENSE, 100) + 2 * flops
    assert training_flops_per_token(model, 100) == 3 * forward_flops_per_token(model, 100)


def test_parameters_of_latents_are_those_of_their_projections() -> None:
    """Queries and outputs of 4 heads of 8 columns, latents of 12 with rotary keys of 4, 4 keys and 8 values per head."""
    per_layer = 2 * 32 * 32 + 32 * 16 + 12 * 4 * (4 + 8)
    assert count_parameters(LATENT).attention == 4 * per_layer
    assert count_parameters(LATENT).norms == 4 * (2 * 32 + 12) + 32


def test_sharing_costs_key_products_and_not_reads() -> None:
    alone, shared = MODELS["memory"], MODELS["memory, ring of 3"]
    assert forward_flops_per_token(shared, 64) > forward_flops_per_token(alone, 64)
    assert count_parameters(shared).read_values == count_parameters(alone).read_values
