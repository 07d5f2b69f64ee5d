"""Every number of the configuration at its limits: the last value that can run passes, the first that cannot is refused
by key and value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from megamem.config.base import Config, field_specs
from pretrain.config.keys import variants_of
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tests.plain_config import parse_config
from tools.config.describe import describe_fields

TINY = 5e-324
"""The smallest float above 0."""


class Limit(NamedTuple):
    """A limit of a key, and what else has to be set for the key to be read and its neighbours to be out of its way."""

    key: str
    good: Any
    bad: Any
    context: Mapping[str, Any]


def at_least(smallest: int, *keys: str, **context: Any) -> list[Limit]:
    return [Limit(key, smallest, smallest - 1, context) for key in keys]


def not_negative(*keys: str, **context: Any) -> list[Limit]:
    return [Limit(key, 0.0, -TINY, context) for key in keys]


def above_zero(*keys: str, **context: Any) -> list[Limit]:
    return [Limit(key, TINY, 0.0, context) for key in keys]


def below(bound: float, *keys: str, **context: Any) -> list[Limit]:
    return [Limit(key, math.nextafter(bound, -math.inf), bound, context) for key in keys]


def at_most(largest: float, *keys: str, **context: Any) -> list[Limit]:
    following = largest + 1 if isinstance(largest, int) else math.nextafter(largest, math.inf)
    return [Limit(key, largest, following, context) for key in keys]


# Keyword arguments cannot hold dots: `model__moe` is `model.moe`.
MOE: dict[str, Any] = {"model__moe__num_experts": 4, "model__moe__top_k": 1}
BY_ROW: dict[str, Any] = {"model__memory__top_k": 1, "model__memory__num_cores": 1, "optimizer__tables": "row_wise"}
MEMORY: dict[str, Any] = {"model__memory__top_k": 1, "model__memory__num_cores": 1}
SPLIT: dict[str, Any] = {**MEMORY, "parallel__memory": 2}
BALANCED: dict[str, Any] = {**MEMORY, "model__memory__key_balance_weight": 1.0}
PENALISED: dict[str, Any] = {**MEMORY, "model__memory__tucker_penalty_weight": 1.0}
CHOOSING: dict[str, Any] = {
    **BY_ROW,
    "optimizer__table_gradients": "rows",
    "optimizer__value_weight_decay": 0.0,
    "optimizer__trained_rows__score": "reads",
}
MUON: dict[str, Any] = {"optimizer__matrices": "muon"}
END_MULTIPLIER: dict[str, Any] = {**MEMORY, "optimizer__value_lr_end_multiplier": 1.0}

MOVE: dict[str, Any] = {"model__memory__kind": "move", "model__memory__num_gate_heads": 4}
ENGRAM: dict[str, Any] = {"model__memory__kind": "engram"}
POLYNOMIAL: dict[str, Any] = {
    "model__memory__kind": "ngram_embedding",
    "model__memory__address__rules": "polynomial",
}
VALUE_NGRAMS: dict[str, Any] = {"model__memory__kind": "value_ngrams"}
MOME: dict[str, Any] = {
    "model__memory__kind": "mome",
    "model__memory__num_heads": 4,
    "model__memory__active_slots": 1,
    "model__memory__num_slots": 5,
}
MIDUS: dict[str, Any] = {
    "model__memory__kind": "midus",
    "model__memory__top_k": 1,
    "model__memory__num_heads": 4,
    "model__memory__placement__blocks": [1],
}
SKIPPING: dict[str, Any] = {"health__spikes__action": "skip"}
STAGE: dict[str, Any] = {"stage__name": "x"}

LLAMA3: dict[str, Any] = {"model__rotary_scaling__kind": "llama3"}

LIMITS = [
    *at_least(0, "seed"),
    *at_most(2**31 - 1, "seed"),
    # model
    *at_least(1, "model.num_layers", "model.num_attention_heads", "model.num_query_groups", "model.ffn_hidden_size"),
    # Digits too many would make as many objects.
    *at_most(10_000, "model.num_layers"),
    *at_most(1024, "model.memory.heads_per_order", **ENGRAM),
    *at_least(1, "model.vocab_size", "model.vocab_size_multiple", "model.rotary_base"),
    *at_least(1, "model.latent_attention.latent_dim"),
    *at_least(0, "model.latent_attention.rotary_dim"),
    *at_least(1, "model.latent_attention.query_latent_dim"),
    Limit("model.rotary_scaling.factor", 1.0, math.nextafter(1.0, 0.0), {}),
    *at_least(1, "model.rotary_scaling.original_length"),
    # The upper end of a range is above the lower one.
    Limit("model.rotary_scaling.beta_fast", 2 * TINY, 0.0, {"model__rotary_scaling__beta_slow": TINY}),
    *above_zero("model.rotary_scaling.beta_slow", "model.rotary_scaling.attention_factor"),
    *above_zero("model.rotary_scaling.low_frequency_factor", **LLAMA3),
    Limit(
        "model.rotary_scaling.high_frequency_factor",
        2 * TINY,
        0.0,
        {**LLAMA3, "model__rotary_scaling__low_frequency_factor": TINY},
    ),
    *at_least(1, "model.hidden_size", model__head_dim=2),
    # Rotary embeddings need an even width, so the smallest is 2; 1 is refused for being odd.
    Limit("model.head_dim", 2, 0, {}),
    *above_zero("model.norm_epsilon", "model.init_std"),
    *at_least(1, "model.moe.num_experts", "model.moe.top_k", "model.moe.expert_ffn_hidden_size", **MOE),
    *at_most(4, "model.moe.top_k", **MOE),
    *not_negative("model.moe.balance_loss_weight", "model.moe.z_loss_weight", **MOE),
    *at_least(1, "model.moe.balance_sequences", **MOE),
    *at_least(1, "model.residual_streams.count", "model.residual_streams.iterations"),
    *at_least(1, "model.residual_streams.rank", model__residual_streams__kind="gated"),
    *above_zero("model.residual_streams.epsilon", "model.residual_streams.norm_epsilon"),
    *at_least(1, "model.multi_token_prediction.depth"),
    *above_zero("model.multi_token_prediction.loss_weight"),
    *at_least(1, "model.mup.base_hidden_size"),
    *at_least(1, "model.mup.base_head_dim", model__mup__base_hidden_size=64),
    *at_least(1, "optimizer.tables_every", optimizer__table_gradients="rows", **BY_ROW),
    *at_least(1, "model.memory.num_keys", "model.memory.key_dim", "model.memory.value_dim", **MEMORY),
    *at_least(1, "model.memory.top_k", "model.memory.row_top_k_limit", "model.memory.num_heads", **MEMORY),
    *at_least(1, "model.memory.tucker_rank", "model.memory.num_cores", "model.memory.key_expansion", **MEMORY),
    *at_least(0, "model.memory.pre_value_dim", **MEMORY),
    *at_least(1, "model.memory.vocab_size", "model.memory.num_slots", "model.memory.num_gate_heads", **MOVE),
    *at_most(128, "model.memory.num_gate_heads", **MOVE),
    *at_least(
        1,
        "model.memory.num_rows",
        model__memory__kind="linear_memory",
        model__memory__top_k=1,
        model__memory__value_dim=128,
    ),
    *at_least(1, "model.memory.gate_channels", "model.memory.address.heads_per_order", **VALUE_NGRAMS),
    *at_most(128, "model.memory.gate_channels", **VALUE_NGRAMS),
    *at_least(2, "model.memory.address.max_order", **VALUE_NGRAMS),
    *at_most(4, "model.memory.address.max_order", **VALUE_NGRAMS),
    *at_least(1, "model.memory.address.num_sign_patterns", model__memory__address__signs="ids", **VALUE_NGRAMS),
    *at_least(3, "model.memory.address.num_rows", **VALUE_NGRAMS),
    *at_least(1, "model.memory.address.base", **POLYNOMIAL),
    *at_least(0, "model.memory.address.boundary_id", **POLYNOMIAL),
    *at_least(1, "model.memory.num_slots", "model.memory.active_slots", "model.memory.gate_channels", **MOME),
    *at_most(5, "model.memory.active_slots", **MOME),
    *at_most(128, "model.memory.gate_channels", **MOME),
    *at_least(1, "model.memory.num_tables", model__memory__kind="tide"),
    *at_least(2, "model.memory.max_order", "model.memory.rows_per_head", **ENGRAM),
    *at_most(4, "model.memory.max_order", **ENGRAM),
    *at_least(1, "model.memory.heads_per_order", "model.memory.rows_multiple", **ENGRAM),
    *above_zero("model.memory.key_epsilon", "model.memory.query_epsilon", "model.memory.conv_epsilon", **ENGRAM),
    *at_least(0, "model.memory.conv_kernel", "model.memory.boundary_id", "model.memory.hash_seed", **ENGRAM),
    *at_least(1, "model.memory.compressed_vocab_size", **ENGRAM, model__memory__token_map="map.npy"),
    *at_least(1, "model.memory.num_keys", "model.memory.value_dim", "model.memory.top_k", **MIDUS),
    *at_least(4, "model.memory.num_keys", **{**MIDUS, "model__memory__top_k": 4}),
    # As many rows as are to be selected, and as many candidates as values.
    *at_least(16, "model.memory.num_keys", model__memory__top_k=16),
    *at_least(8, "model.memory.num_keys", model__memory__top_k=16, model__memory__key_expansion=2),
    *at_most(16, "model.memory.top_k", model__memory__row_top_k_limit=4),
    *not_negative("model.memory.tucker_penalty_weight", "model.memory.key_balance_weight", **MEMORY),
    *not_negative("model.memory.tucker_penalty_margin", **PENALISED),
    *at_least(1, "model.memory.key_balance_sequences", **BALANCED),
    *at_least(1, "model.memory.sharing.group", **MEMORY, model__memory__sharing__pattern="block"),
    *at_most(4, "model.memory.sharing.group", **MEMORY, model__memory__sharing__pattern="ring"),
    *at_least(1, "model.memory.placement.every", **MEMORY),
    *at_least(1, "model.memory.placement.query_group", **MEMORY),
    Limit("model.memory.placement.blocks", [0], [-1], MEMORY),
    # parallel
    *at_least(1, "parallel.tensor", "parallel.pipeline", "parallel.context"),
    *at_least(1, "parallel.virtual_pipeline", parallel__pipeline=2),
    *at_least(1, "parallel.memory", **MEMORY),
    *at_least(1, "parallel.memory_rows", **SPLIT),
    *above_zero("parallel.gradient_sm_share", **SPLIT),
    *at_most(1.0, "parallel.gradient_sm_share", **SPLIT),
    *above_zero("parallel.timeout_minutes"),
    # train
    *at_least(1, "train.num_steps", "train.sequence_length", "train.loss_chunk_tokens", "train.max_skipped_steps"),
    *at_least(1, "train.recompute_streams", model__residual_streams__count=2),
    *at_least(1, "train.global_batch_size", "train.micro_batch_size", train__micro_batch_size=1),
    *at_least(1, "train.batch_ramp.start_size", "train.batch_ramp.increment", train__micro_batch_size=1),
    *at_most(31, "train.batch_ramp.start_size", train__micro_batch_size=1, train__global_batch_size=32),
    *at_least(1, "train.batch_ramp.over_tokens", train__micro_batch_size=1),
    # optimizer
    *above_zero("optimizer.lr", optimizer__schedule="constant"),
    *above_zero("optimizer.epsilon"),
    *not_negative("optimizer.min_lr", "optimizer.weight_decay", "optimizer.clip_grad"),
    *at_most(0.5, "optimizer.min_lr", optimizer__lr=0.5),
    *not_negative("optimizer.beta1", "optimizer.beta2"),
    *below(1.0, "optimizer.beta1", "optimizer.beta2"),
    *not_negative("optimizer.row_beta2", **BY_ROW),
    *below(1.0, "optimizer.row_beta2", **BY_ROW),
    *at_least(1, "optimizer.trained_rows.number", **CHOOSING),
    *above_zero("optimizer.trained_rows.share", **CHOOSING),
    *at_most(1.0, "optimizer.trained_rows.share", **CHOOSING),
    *at_least(0, "optimizer.warmup_steps"),
    *at_most(100, "optimizer.warmup_steps", train__num_steps=100),
    *not_negative("optimizer.warmup_start", optimizer__warmup_steps=5),
    *at_most(1.0, "optimizer.warmup_start", optimizer__warmup_steps=5),
    *at_least(1, "optimizer.decay_steps", optimizer__schedule="wsd"),
    *at_most(95, "optimizer.decay_steps", optimizer__schedule="wsd", optimizer__warmup_steps=5, train__num_steps=100),
    *not_negative("optimizer.value_weight_decay", "optimizer.value_clip_grad", "optimizer.value_lr", **MEMORY),
    *not_negative("optimizer.value_lr_multiplier", "optimizer.value_lr_end_multiplier", **MEMORY),
    *not_negative("optimizer.pre_value_lr_multiplier", **MEMORY),
    *not_negative("optimizer.retrieval_lr", "optimizer.retrieval_weight_decay", **MEMORY),
    *at_least(0, "optimizer.value_lr_decay_tokens", **END_MULTIPLIER),
    *above_zero("optimizer.muon_lr_multiplier", **MUON),
    *not_negative("optimizer.muon_weight_decay", "optimizer.muon_momentum", **MUON),
    *below(1.0, "optimizer.muon_momentum", **MUON),
    *at_least(1, "optimizer.muon_ns_steps", **MUON),
    *at_most(20, "optimizer.muon_ns_steps", **MUON),
    # data, and what is done on the way
    *above_zero("data.datasets.0.weight", "data.datasets.0.epochs", data__datasets__0__path="x"),
    *at_least(0, "data.seed", "data.num_workers"),
    *at_most(2**31 - 1, "data.seed"),
    *at_least(0, "evaluation.every_steps"),
    *at_least(1, "evaluation.max_sequences"),
    *at_least(1, "checkpoint.writer_threads"),
    *at_least(0, "checkpoint.every_steps", "checkpoint.keep_last", "checkpoint.keep_every_steps"),
    *at_least(0, "stage.steps_before", "stage.samples_before", "stage.tokens_before", "stage.first_sample", **STAGE),
    *at_least(1, "stage.run_steps", "stage.run_tokens", **STAGE),
    *at_least(1, "logging.every_steps"),
    *at_least(0, "logging.memory_every_steps", **MEMORY),
    # health
    *at_least(2, "health.spikes.window_steps", **SKIPPING),
    *above_zero("health.spikes.loss_deviations", "health.spikes.grad_norm_deviations", **SKIPPING),
    *at_least(1, "health.spikes.max_rewinds", health__spikes__action="rewind", checkpoint__every_steps=1),
    *not_negative("health.hang_minutes"),
    *below(10.0, "health.hang_minutes"),
    *above_zero("health.long_phase_minutes"),
    *at_least(0, "health.slow_ranks.every_steps", "health.compare_replicas_every_steps"),
    Limit("health.slow_ranks.factor", math.nextafter(1.0, 2.0), 1.0, {}),
    *at_least(1, "health.slow_ranks.windows"),
]


def config_with(limit: Limit, value: Any) -> RunConfig:
    tree: dict[str, Any] = {}
    settings = {key.replace("__", "."): setting for key, setting in limit.context.items()} | {limit.key: value}
    for key, setting in settings.items():
        *path, name = key.split(".")
        owner = tree
        for segment in path:
            owner = owner.setdefault(segment, {})
        owner[name] = setting
    if isinstance(entries := tree.get("data", {}).get("datasets"), dict):
        tree["data"]["datasets"] = list(entries.values())
    return parse_config(tree, RunConfig)


def test_the_last_good_value_of_every_limit_passes() -> None:
    for limit in LIMITS:
        try:
            validate(config_with(limit, limit.good), None)
        except ConfigError as error:
            pytest.fail(f"{limit.key} = {limit.good}: {error}")


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.key}={limit.bad}")
def test_the_first_bad_value_is_refused_by_key_and_value(limit: Limit) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(config_with(limit, limit.bad), None)
    message = str(refused.value)
    assert re.search(rf"(?<![\w.]){re.escape(limit.key)} (is )?{re.escape(str(limit.bad))}(?![\w.])", message), message


def test_every_number_of_the_schema_has_a_limit() -> None:
    """Upwards most have none: what a machine can hold is not known here."""
    numbers = {doc.key for doc in describe_fields(RunConfig) if doc.type.split(" ")[0] in ("int", "float")}
    # The sections of a second memory are those of the first.
    numbers = {key for key in numbers if not key.startswith("model.second_memory.")}
    assert len(numbers) > 60
    limited = {limit.key.replace("datasets.0", "datasets.N") for limit in LIMITS}
    assert limited - {"model.memory.placement.blocks"} == numbers


def classes_below(cls: type[Config]) -> set[type[Config]]:
    sections = [spec.section for spec in field_specs(cls).values() if spec.section is not None]
    return {cls, *variants_of(cls).values()}.union(*map(classes_below, sections))


@pytest.mark.parametrize("cls", sorted(classes_below(RunConfig), key=lambda cls: cls.__name__))
def test_objects_made_in_code_are_held_to_the_same_limits(cls: type[Config]) -> None:
    for name, spec in field_specs(cls).items():
        required = {other: "x" for other, its in field_specs(cls).items() if its.required}
        if not spec.is_list and spec.broken_limit(-1) is not None:
            with pytest.raises(ValueError, match=rf"^{cls.__name__}\.{name} is -1: it must"):
                cls(**{**required, name: -1})
