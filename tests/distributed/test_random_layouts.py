"""Models and layouts that nobody chose: drawn pairs train in fp64 as on one rank.

The draw is another one every week, so that CI meets pairs that no table has; a failure prints its pair, and the week's number
repeats it. `MEGAMEM_PAIRS=200 MEGAMEM_PAIRS_SEED=7 pytest tests/distributed/test_random_layouts.py` draws more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from test_kinds_layouts import KINDS as RETRIEVED
from test_layouts import assembled
from test_layouts_fp64 import train
from test_moe import EXPERTS
from test_stream_layouts import STREAMS
from test_token_layouts import KINDS as BY_TOKENS
from tiny_runs import SHARED, VOCAB_SIZE

from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import LatentAttentionConfig, MultiTokenConfig
from pretrain.config.keys import ineffective_fields
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate
from pretrain.errors import UserError

NUM_PAIRS = int(os.environ.get("MEGAMEM_PAIRS", "5"))
WEEK = datetime.now(UTC).isocalendar()
SEED = int(os.environ.get("MEGAMEM_PAIRS_SEED", f"{WEEK.year}{WEEK.week:02}"))
NUM_RANKS = 4
MODEL: Mapping[str, tuple[Any, ...]] = {
    "memory": (None, SHARED.model.memory, *RETRIEVED.values(), *filter(None, BY_TOKENS.values())),
    "num_query_groups": (None, 1, 2),
    "head_dim": (None, 16),
    "qk_norm": (True, False),
    "qkv_bias": (False, True),
    "tied_embeddings": (True, False),
    "latent_attention": (
        *(None, None, None),
        LatentAttentionConfig(12, 4),
        LatentAttentionConfig(12, 0, query_latent_dim=20),
    ),
    "moe": (None, None, EXPERTS),
    "residual_streams": (*5 * (None,), *STREAMS.values()),
    "multi_token_prediction": (None, None, MultiTokenConfig(depth=2, loss_weight=0.5)),
    "rotary_scaling": (None, None, RotaryScalingConfig("yarn", factor=4.0, original_length=8)),
}
LAYOUT: Mapping[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4),
    "pipeline": (1, 2, 4),
    "virtual_pipeline": (1, 2),
    "context": (1, 2),
    "context_attention": ("auto", "gather", "ring"),
    "memory": (1, 2, 4),
    "memory_rows": (1, 2),
}
TRAIN: Mapping[str, tuple[Any, ...]] = {
    "micro_batch_size": (1, 2, 4),
    "recompute": ("none", "selective", "full"),
    "loss_chunk_tokens": (5, 4096),
}


def drawn(seed: int) -> RunConfig:
    """A model on four ranks that no rule refuses."""
    draw = random.Random(seed)

    def some(options: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {name: draw.choice(values) for name, values in options.items()}

    for _ in range(10_000):
        try:
            config = replace(
                SHARED,
                model=replace(SHARED.model, **some(MODEL)),
                parallel=ParallelConfig(**some(LAYOUT)),
                train=replace(SHARED.train, **some(TRAIN)),
                data=replace(SHARED.data, documents=draw.choice(("packed", "separate"))),
            )
            validate(replace(config, model=replace(config.model, vocab_size=VOCAB_SIZE)), NUM_RANKS)
            validate(alone(config), 1)
            set_in_vain = [each for each in ineffective_fields(config) if not each.at_default]
            if any(each.key.startswith("parallel.") for each in set_in_vain):
                continue
            if config.parallel.pipeline > 1 and any(bank.on_every_stage for bank in config.model.memory_plan.banks):
                # Copies of tables are added up by the distributed optimizer's groups, and these are plain gradient steps.
                continue
        except (UserError, ValueError):
            continue
        return config
    raise AssertionError("rules refuse all that is drawn")


def alone(config: RunConfig) -> RunConfig:
    """The run on one rank, with as little else as can be."""
    train = replace(
        config.train, micro_batch_size=4, recompute="none", loss_chunk_tokens=SHARED.train.loss_chunk_tokens
    )
    return replace(config, parallel=ParallelConfig(), train=train)


def results(config: RunConfig) -> Any:
    """Shards of the trained parameters, or what ended the training, in words."""
    try:
        return train(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_drawn_model_on_a_drawn_layout_trains_as_on_one_rank(run_ranks: Callable[..., Any]) -> None:
    configs = [drawn(SEED * 1000 + number) for number in range(NUM_PAIRS)]
    (expected,) = run_ranks(lambda: [results(alone(config)) for config in configs], 1, timeout_s=60 + 8 * NUM_PAIRS)
    by_rank = run_ranks(lambda: [results(config) for config in configs], NUM_RANKS, timeout_s=60 + 16 * NUM_PAIRS)
    wrong = []
    for number, (config, of_one, *of_ranks) in enumerate(zip(configs, expected, *by_rank, strict=True)):
        has_roots = any(memory.kind == "engram" for memory in config.model.memories)
        # Cross entropies of whole logits are in fp32, those of chunks in fp64, and split vocabularies add up in another order. A
        # gate with a root makes more of it: the first difference alone moved a bias that begins at 0 by 4e-6, on one rank.
        bound = 1e-4 if config.parallel.tensor > 1 else 1e-5 if has_roots else 1e-6
        problem = difference(of_one, of_ranks, bound)
        if problem:
            wrong.append(
                f"pair {SEED * 1000 + number}: {problem}\n  {config.model}\n  {config.parallel}\n  {config.train}\n  {config.data}"
            )
    assert not wrong, "\n".join(wrong)


def difference(of_one: Any, of_ranks: list[Any], bound: float) -> str:
    """Problem of a run on several ranks; empty: there is none."""
    for found in (of_one, *of_ranks):
        if isinstance(found, str):
            return found
    actual, expected = assembled([shard for of_rank in of_ranks for shard in of_rank]), assembled(of_one)
    if actual.keys() != expected.keys():
        return f"other parameters: {sorted(actual.keys() ^ expected.keys())}"
    errors = {key: float((actual[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected}
    return ", ".join(f"{key} {error:.1e}" for key, error in errors.items() if not error <= bound)
