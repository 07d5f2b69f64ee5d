"""The models that are exported to Hugging Face in tests: every family, and what is special about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiny_runs import MEMORY, SHARED

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import LatentAttentionConfig, ModelConfig, MoEConfig
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
from megamem.families.value_ngrams.config import ValueNgramsConfig
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from pretrain.data.tokenizer import ByteTokenizer

VOCAB_SIZE = ByteTokenizer.vocab_size
HIDDEN = SHARED.model.hidden_size
GRID: Any = {"num_keys": 12, "key_dim": 8, "top_k": 6, "num_heads": 2}
HEADS: Any = {"num_heads": 4, "num_keys": 9, "top_k": 3, "value_dim": 16}
LINEAR: Any = {"num_heads": 2, "num_rows": 50, "key_dim": 6, "top_k": 5, "value_dim": HIDDEN}
INSERTED = PlacementConfig(blocks=(0, 2), position="inserted")
PRODUCT = MemoryPlusConfig(value_dim=16, **GRID)
V2 = replace(MEMORY, top_k=6)
BOUNDARIES = (7, 200)
"""Ids at which windows of the models' n-grams may end: every text of these tests has some inside."""
NGRAMS: Any = {
    "heads_per_order": 2,
    "rows_per_head": 40,
    # Odd, so that codes of four bits end in half a byte.
    "value_dim": 7,
    "vocab_size": VOCAB_SIZE,
    "boundary_id": BOUNDARIES[0],
}
MOE = MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=24)
TOKEN_MAP = "to_50_ids.npy"
BASE = replace(SHARED.model, vocab_size=VOCAB_SIZE, memory=None)
LATENT = replace(BASE, num_query_groups=None, latent_attention=LatentAttentionConfig(12, 4))
MHC = ResidualStreamsConfig(count=3, iterations=4)
SINGLE_PASS = ResidualStreamsConfig(kind="single_pass", iterations=4, epsilon=1e-3)
GATED = ResidualStreamsConfig(kind="gated", count=2, rank=12)
PLAIN = ResidualStreamsConfig(kind="plain", count=3)
MODELS: dict[str, ModelConfig] = {
    "dense, as llama": replace(BASE, qk_norm=False, tied_embeddings=False),
    "dense, as qwen3": replace(BASE, head_dim=10, rotary_base=500),
    "dense, as qwen2": replace(BASE, qk_norm=False, qkv_bias=True),
    "biases and norms of queries and keys": replace(BASE, qkv_bias=True),
    "dense, yarn, as llama": replace(
        BASE,
        qk_norm=False,
        rotary_scaling=RotaryScalingConfig("yarn", factor=6.0, original_length=8, beta_fast=1.2, beta_slow=0.1),
    ),
    "moe, llama3": replace(BASE, moe=MOE, rotary_scaling=RotaryScalingConfig("llama3", factor=6.0, original_length=8)),
    "v2, yarn": replace(
        BASE,
        memory=V2,
        rotary_scaling=RotaryScalingConfig("yarn", factor=6.0, original_length=8, beta_fast=1.2, beta_slow=0.1),
    ),
    "v2, linear": replace(BASE, memory=V2, rotary_scaling=RotaryScalingConfig("linear", factor=6.0)),
    "v2, ntk": replace(BASE, memory=V2, rotary_scaling=RotaryScalingConfig("ntk", factor=6.0)),
    "moe": replace(BASE, moe=MOE),
    "moe, renormalised, no qk_norm": replace(BASE, moe=replace(MOE, renormalise=True), qk_norm=False),
    "v2": replace(BASE, memory=V2),
    "v2, untied, all heads": replace(BASE, memory=V2, tied_embeddings=False, num_query_groups=None, qk_norm=False),
    "v2, blocks of layers": replace(BASE, memory=replace(V2, sharing=SharingConfig("block", 2))),
    "v2, ring, gelu": replace(
        BASE, memory=replace(V2, sharing=SharingConfig("ring", 3), pre_value_activation="gelu", num_heads=2)
    ),
    "v2, permutation, no pre-values": replace(BASE, memory=replace(V2, shuffle="table", pre_value_dim=0)),
    "v2, expanded, projected, one core": replace(
        BASE, memory=replace(V2, key_expansion=2, value_blocks="projected", num_cores=1, tucker_rank=3, num_heads=2)
    ),
    "v2, one query, no shuffle, few rows": replace(
        BASE, memory=replace(V2, query="single", shuffle="none", row_top_k_limit=3)
    ),
    "v2 beside experts, biases": replace(BASE, memory=V2, moe=MOE, qkv_bias=True),
    "v2 instead of feed-forwards": replace(
        BASE, memory=replace(V2, placement=PlacementConfig(blocks=(1, 2), position="instead"))
    ),
    "v2, two blocks with one stream": replace(BASE, memory=replace(V2, placement=PlacementConfig(query_group=2))),
    "ultramem, skipping and overlapping": replace(
        BASE,
        memory=UltraMemConfig(
            num_keys=12, key_dim=8, value_dim=16, top_k=4, placement=PlacementConfig(spans="0:2/1:1/2:3")
        ),
    ),
    "memory_plus": replace(BASE, memory=replace(PRODUCT, biases=True, output_gate=True, sharing=SharingConfig("all"))),
    "pkm": replace(BASE, memory=PkmConfig(value_dim=HIDDEN, **GRID)),
    "pkm, projected": replace(BASE, memory=PkmConfig(value_dim=16, value_projection=True, query_norm=False, **GRID)),
    "midus": replace(
        BASE,
        num_layers=5,
        memory=MidusConfig(num_heads=4, num_keys=9, top_k=3, value_dim=16, placement=PlacementConfig(blocks=(0, 3))),
    ),
    "midus, llama3, all heads, no qk_norm, biases": replace(
        BASE,
        qkv_bias=True,
        num_query_groups=None,
        qk_norm=False,
        tied_embeddings=False,
        rotary_scaling=RotaryScalingConfig("llama3", factor=6.0, original_length=8),
        memory=MidusConfig(num_heads=4, num_keys=6, top_k=4, value_dim=8, placement=PlacementConfig(blocks=(2,))),
    ),
    "midus, stream and heads, LayerNorm before attention and of queries": replace(
        BASE,
        memory=MidusConfig(
            **HEADS,
            query_from="stream_and_heads",
            query_norm="layer",
            placement=PlacementConfig(blocks=(1, 2), norm="layer"),
        ),
    ),
    "midus, projected, moe": replace(
        BASE, moe=MOE, memory=MidusConfig(**HEADS, query_from="projected", placement=PlacementConfig(blocks=(1,)))
    ),
    "linear_memory, inserted": replace(BASE, memory=LinearConfig(**LINEAR, placement=INSERTED)),
    "linear_memory": replace(BASE, memory=LinearConfig(**LINEAR)),
    "pkm, inserted": replace(BASE, memory=PkmConfig(value_dim=HIDDEN, placement=INSERTED, **GRID)),
    "memory_plus, inserted, LayerNorm": replace(
        BASE, memory=replace(PRODUCT, biases=True, placement=replace(INSERTED, norm="layer"))
    ),
    "ultramem, inserted, queries per head": replace(
        BASE, memory=UltraMemConfig(value_dim=16, queries_per_head=True, placement=INSERTED, **GRID)
    ),
    "ultramem, queries of three heads": replace(
        BASE, memory=UltraMemConfig(value_dim=16, queries_per_head=True, **{**GRID, "num_heads": 3})
    ),
    "v2, inserted": replace(BASE, memory=replace(V2, pre_value_dim=0, placement=INSERTED)),
    "engram": replace(
        BASE,
        memory=EngramConfig(
            **NGRAMS, token_map=TOKEN_MAP, compressed_vocab_size=50, placement=PlacementConfig(blocks=(1, 3))
        ),
    ),
    "engram beside experts": replace(
        BASE, moe=MOE, memory=EngramConfig(**NGRAMS, conv_kernel=0, placement=PlacementConfig(blocks=(0, 1)))
    ),
    "ple": replace(
        BASE,
        memory=EngramConfig(
            rules="ple",
            **(NGRAMS | {"boundary_id": BOUNDARIES[1]}),
            max_order=4,
            conv_kernel=2,
            projection_biases=False,
            key_epsilon=0.03,
            query_epsilon=0.01,
            conv_epsilon=0.1,
        ),
    ),
    "peer": replace(BASE, memory=PeerConfig(value_dim=HIDDEN, biases=True, sharing=SharingConfig("ring", 2), **GRID)),
    "move": replace(
        # As in most runs, which leave it to the tokenizer.
        BASE,
        vocab_size=None,
        memory=MoveConfig(value_dim=BASE.query_groups * BASE.attention_head_dim, num_gate_heads=2),
    ),
    "lave, every second, a gate per token, more rows": replace(
        BASE,
        tied_embeddings=False,
        memory=LaveConfig(
            value_dim=BASE.query_groups * BASE.attention_head_dim,
            num_gate_heads=1,
            vocab_size=VOCAB_SIZE + 3,
            placement=PlacementConfig(every=2),
        ),
    ),
    "tide": replace(BASE, memory=TideConfig(value_dim=HIDDEN, num_tables=3)),
    "tide, no gain, beside experts": replace(
        BASE, moe=MOE, memory=TideConfig(value_dim=HIDDEN, num_tables=2, row_gain=False)
    ),
    "move by n-grams": replace(
        BASE,
        memory=MoveConfig(
            value_dim=BASE.query_groups * BASE.attention_head_dim,
            num_gate_heads=2,
            num_slots=2,
            address=NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=60),
        ),
    ),
    "lave by n-grams, documents apart": replace(
        BASE,
        memory=LaveConfig(
            value_dim=BASE.query_groups * BASE.attention_head_dim,
            num_gate_heads=1,
            address=NgramAddressConfig(rules="xor", max_order=3, num_rows=41),
            placement=PlacementConfig(every=2),
        ),
    ),
    "ngram embedding, amplified": replace(
        BASE,
        vocab_size=None,
        memory=NgramEmbeddingConfig(
            value_dim=6,
            amplification="layer_norm",
            address=NgramAddressConfig(
                rules="polynomial", max_order=3, heads_per_order=2, num_rows=40, boundary_id=BOUNDARIES[0]
            ),
        ),
    ),
    "bigrams in values, and ngram embedding": replace(
        BASE,
        memory=ValueNgramsConfig(value_dim=6, address=NgramAddressConfig(num_rows=40)),
        second_memory=NgramEmbeddingConfig(value_dim=6, address=NgramAddressConfig(max_order=4, num_rows=60)),
    ),
    "value n-grams": replace(
        BASE,
        memory=ValueNgramsConfig(
            address=NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=60, signs="ids", num_sign_patterns=21),
            value_dim=6,
        ),
    ),
    "value n-grams in one head, documents apart": replace(
        BASE,
        memory=ValueNgramsConfig(
            address=NgramAddressConfig(heads_per_order=2, num_rows=60),
            value_dim=BASE.attention_head_dim // 2,
            into="one_head",
            gate_bias=True,
            gate_channels=5,
        ),
    ),
    "residual n-grams": replace(
        BASE,
        memory=ResidualNgramsConfig(
            value_dim=HIDDEN // 2,
            address=NgramAddressConfig(rules="xor", max_order=3, num_rows=41, signs="hashed", num_sign_patterns=19),
            placement=PlacementConfig(blocks=(1, 3)),
        ),
    ),
    "residual n-grams without signs, documents apart": replace(
        BASE, memory=ResidualNgramsConfig(value_dim=HIDDEN, address=NgramAddressConfig(max_order=3, num_rows=60))
    ),
    "lave by n-grams, and residual n-grams": replace(
        BASE,
        memory=LaveConfig(
            value_dim=BASE.query_groups * BASE.attention_head_dim,
            address=NgramAddressConfig(max_order=3, num_rows=60),
            placement=PlacementConfig(blocks=(0, 1, 3)),
        ),
        second_memory=ResidualNgramsConfig(
            value_dim=HIDDEN // 2,
            address=NgramAddressConfig(rules="xor", num_rows=41, signs="ids", num_sign_patterns=19),
            # Its addresses are behind the other's.
            placement=PlacementConfig(blocks=(1, 3)),
        ),
    ),
    "tide, and move by n-grams": replace(
        BASE,
        memory=TideConfig(value_dim=HIDDEN, num_tables=2, placement=PlacementConfig(blocks=(1, 2))),
        second_memory=MoveConfig(
            value_dim=BASE.query_groups * BASE.attention_head_dim,
            num_slots=2,
            num_gate_heads=2,
            address=NgramAddressConfig(max_order=3, num_rows=60),
        ),
    ),
    "mome": replace(
        BASE,
        memory=MomeConfig(
            num_heads=BASE.query_groups,
            value_dim=BASE.attention_head_dim,
            num_slots=5,
            active_slots=3,
            gate_channels=7,
            one_table=True,
        ),
    ),
    "mome by n-grams, routed by values, one slot, documents apart": replace(
        BASE,
        memory=MomeConfig(
            num_heads=BASE.query_groups,
            value_dim=BASE.attention_head_dim,
            num_slots=3,
            active_slots=1,
            router_input="value",
            gate_channels=7,
            address=NgramAddressConfig(max_order=3, num_rows=60),
            placement=PlacementConfig(every=2),
        ),
    ),
    "tide by n-grams": replace(
        BASE,
        memory=TideConfig(value_dim=HIDDEN, num_tables=2, address=NgramAddressConfig(max_order=3, num_rows=53)),
    ),
    "stem by n-grams": replace(
        BASE,
        memory=StemConfig(
            value_dim=20, address=NgramAddressConfig(max_order=3, num_rows=60), placement=PlacementConfig(blocks=(1, 3))
        ),
    ),
    "stem": replace(BASE, memory=StemConfig(value_dim=20, placement=PlacementConfig(blocks=(1, 2, 3)))),
    "stem, every second, beside experts, more rows": replace(
        BASE,
        moe=MOE,
        tied_embeddings=False,
        memory=StemConfig(value_dim=20, vocab_size=VOCAB_SIZE + 3, placement=PlacementConfig(every=2)),
    ),
    "stem in every block, and move": replace(
        BASE,
        vocab_size=None,
        ffn_hidden_size=ModelConfig.ffn_hidden_size,
        memory=StemConfig(value_dim=20),
        second_memory=MoveConfig(value_dim=BASE.query_groups * BASE.attention_head_dim, num_gate_heads=2),
    ),
    "engram and move by n-grams": replace(
        BASE,
        vocab_size=None,
        memory=EngramConfig(
            **NGRAMS, token_map=TOKEN_MAP, compressed_vocab_size=50, placement=PlacementConfig(blocks=(1, 2))
        ),
        # Fewer tokens back than Engram's, of raw ids.
        second_memory=MoveConfig(
            value_dim=BASE.query_groups * BASE.attention_head_dim,
            num_gate_heads=2,
            address=NgramAddressConfig(heads_per_order=2, num_rows=60),
        ),
    ),
    "v2 with one stream and lave, beside experts": replace(
        BASE,
        moe=MOE,
        memory=replace(V2, sharing=SharingConfig("block", 2), placement=PlacementConfig(query_group=4)),
        second_memory=LaveConfig(
            value_dim=BASE.query_groups * BASE.attention_head_dim, placement=PlacementConfig(every=2)
        ),
    ),
    "ultramem, skipping, and engram": replace(
        BASE,
        memory=UltraMemConfig(num_keys=12, key_dim=8, value_dim=16, top_k=4, placement=PlacementConfig(spans="0:2")),
        second_memory=EngramConfig(**NGRAMS, conv_kernel=2, placement=PlacementConfig(blocks=(1, 3))),
    ),
    "latents": LATENT,
    "latents of queries too, llama3, beside experts": replace(
        LATENT,
        moe=MOE,
        latent_attention=LatentAttentionConfig(12, 4, query_latent_dim=10),
        rotary_scaling=RotaryScalingConfig("llama3", factor=6.0, original_length=8),
    ),
    "move over latents": replace(
        LATENT,
        rotary_scaling=RotaryScalingConfig("ntk", factor=6.0),
        memory=MoveConfig(value_dim=12, num_gate_heads=3, mixed_into="latents"),
    ),
    "lave over latents of values, no norms, no rotary keys": replace(
        LATENT,
        qk_norm=False,
        latent_attention=LatentAttentionConfig(12, 0),
        memory=LaveConfig(value_dim=12, num_gate_heads=2, gated_standard_path=True),
    ),
    "pkm, inserted, over latents": replace(LATENT, memory=PkmConfig(value_dim=HIDDEN, placement=INSERTED, **GRID)),
    "streams, mhc, dense": replace(BASE, residual_streams=MHC, qk_norm=False, tied_embeddings=False),
    "streams, mhc, engram": replace(
        BASE,
        residual_streams=replace(MHC, norm_epsilon=0.02),
        memory=EngramConfig(**NGRAMS, placement=PlacementConfig(blocks=(1, 3))),
    ),
    "streams, single pass, learned keys that join later": replace(
        BASE,
        residual_streams=SINGLE_PASS,
        memory=UltraMemConfig(
            num_keys=12, key_dim=8, value_dim=16, top_k=4, placement=PlacementConfig(spans="0:2/1:1/2:3")
        ),
    ),
    "streams, single pass, ngram embedding, experts": replace(
        BASE,
        residual_streams=SINGLE_PASS,
        moe=MOE,
        memory=NgramEmbeddingConfig(
            value_dim=6, amplification="layer_norm", address=NgramAddressConfig(max_order=3, num_rows=40)
        ),
    ),
    "streams, single pass, engram before all, and move": replace(
        BASE,
        vocab_size=None,
        residual_streams=SINGLE_PASS,
        memory=EngramConfig(**NGRAMS, conv_kernel=0, placement=PlacementConfig(blocks=(0, 2))),
        second_memory=MoveConfig(value_dim=BASE.query_groups * BASE.attention_head_dim, num_gate_heads=2),
    ),
    "streams, gated, ple": replace(
        BASE,
        residual_streams=GATED,
        memory=EngramConfig(
            rules="ple", **NGRAMS, max_order=4, conv_kernel=2, projection_biases=False, query_epsilon=0.01
        ),
    ),
    "streams, gated, residual n-grams, experts": replace(
        BASE,
        residual_streams=GATED,
        moe=MOE,
        memory=ResidualNgramsConfig(
            value_dim=HIDDEN // 2,
            address=NgramAddressConfig(rules="xor", max_order=3, num_rows=41, signs="hashed", num_sign_patterns=19),
            placement=PlacementConfig(blocks=(1, 3)),
        ),
    ),
    "streams, gated, learned keys, query group": replace(
        BASE, residual_streams=GATED, memory=replace(V2, placement=PlacementConfig(query_group=2))
    ),
    "streams, plain, query group": replace(
        BASE, residual_streams=PLAIN, memory=replace(V2, placement=PlacementConfig(query_group=2))
    ),
    "streams, plain, latents, mixed values": replace(
        LATENT, residual_streams=PLAIN, memory=MoveConfig(value_dim=12, num_gate_heads=3, mixed_into="latents")
    ),
    "streams, static, instead of feed-forwards": replace(
        BASE,
        residual_streams=ResidualStreamsConfig(kind="plain", count=2, dynamic=False),
        memory=replace(V2, placement=PlacementConfig(blocks=(1, 3), position="instead")),
    ),
    "streams, one of them, stem": replace(
        BASE,
        residual_streams=replace(MHC, count=1),
        memory=StemConfig(value_dim=20, placement=PlacementConfig(blocks=(1, 3))),
    ),
}
