"""A text that goes through the model token by token, with what attention remembers, gives the logits of the whole text.

Legend: b sequences, s tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_kinds_layouts import KINDS as RETRIEVING
from test_stream_layouts import config_of as config_of_streams
from test_token_layouts import KINDS as OF_TOKENS
from test_token_layouts import config_of as config_of_tokens
from tiny_runs import SHARED, VOCAB_SIZE, joined, on
from torch import Tensor, nn

from megamem.attention.kv_cache import KeyValueCache
from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import LatentAttentionConfig, MoEConfig
from megamem.model import MemoryGPTModel
from megamem.placement.spans import PlacementConfig
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.build import build_chunks
from pretrain.evaluation.generate import generate
from pretrain.evaluation.sampling import Sampling
from pretrain.planning.counts.attention import cached_bytes_per_token, expanded_bytes
from tests.rotation import in_rotation

OF_STREAMS = (
    "mhc, engram, experts",
    "single pass, learned keys that join later",
    "gated, ple, muon",
    "plain, one query",
)
OF_TWO_KINDS = (
    "tide, no gain, in blocks of mome by n-grams",
    "engram beside bigrams, one head of two, documents apart",
)
LENGTH = SHARED.train.sequence_length
# Largest error over the largest logit.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-6}
# First tokens of a text that is continued token by token: by the first one alone, and by most of it at once.
BEGINNING = {torch.float64: 1, torch.float32: LENGTH - 4}


def dense(**model: Any) -> RunConfig:
    return replace(SHARED, model=replace(SHARED.model, **({"memory": None} | model)))


def cases() -> dict[str, RunConfig]:
    found = {name: dense(memory=memory) for name, memory in RETRIEVING.items()}
    found |= {name: config_of_tokens(name) for name in (*OF_TOKENS, *OF_TWO_KINDS)}
    found |= {
        "one key per head": dense(num_query_groups=None),
        "one key": dense(num_query_groups=1),
        "without norms of queries and keys": dense(qk_norm=False),
        "latents without rotary columns": dense(
            num_query_groups=None, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=0)
        ),
        "skips": dense(
            memory=replace(RETRIEVING["ultramem"], placement=PlacementConfig(spans="0:2/1:3"))  # type: ignore[type-var]
        ),
        "one stream for all": dense(
            memory=replace(RETRIEVING["pkm"], placement=PlacementConfig(query_group=4))  # type: ignore[type-var]
        ),
        **{f"streams, {name}": config_of_streams(name) for name in OF_STREAMS},
        "experts": dense(moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=24)),
        "separate documents": replace(dense(), data=replace(SHARED.data, documents="separate")),
    }
    scalings = [
        RotaryScalingConfig(kind, factor=4.0, original_length=8) for kind in ("linear", "ntk", "yarn", "llama3")
    ]
    return found | {scaling.kind: dense(rotary_scaling=scaling) for scaling in scalings}


CASES = cases()
OF_SHARE = in_rotation(list(CASES))


def some_tokens(num_sequences: int = 2) -> Tensor:
    return torch.randint(VOCAB_SIZE, (num_sequences, LENGTH), generator=torch.Generator().manual_seed(7))


def chunk_of(config: RunConfig, groups: ParallelGroups, dtype: torch.dtype) -> MemoryGPTModel:
    """A model of which no weight is where it starts: tables may start at 0."""
    (chunk,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in chunk.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype)
    chunk.begin_step()
    return chunk.eval()


def places(tokens: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + tokens.shape[1]).expand_as(tokens)


def pieces(num_first: int) -> list[slice]:
    return [slice(0, num_first), *(slice(at, at + 1) for at in range(num_first, LENGTH))]


@torch.no_grad()
def continued(chunk: MemoryGPTModel, tokens: Tensor, num_first: int) -> tuple[Tensor, KeyValueCache]:
    """Logits [b, s - num_first + 1, V] of the last of the first tokens and of each that follows."""
    cache = KeyValueCache(LENGTH)
    logits = []
    for piece in pieces(num_first):
        new = tokens[:, piece]
        logits.append(chunk(new, places(new, piece.start), None, cache=cache))
        assert cache.num_tokens == piece.stop
    return torch.cat(logits, 1), cache


@torch.no_grad()
def at_once(chunk: MemoryGPTModel, tokens: Tensor) -> Tensor:
    return chunk(tokens, places(tokens, 0), None)


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(scope="module")
def told(run_ranks: Any) -> dict[str, dict[str, Any]]:
    """Errors over what is tolerated, and bytes per token, by case and dtype."""

    def main() -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        tokens = some_tokens()
        with joined(on(SHARED)) as groups:
            for name in OF_SHARE:
                config = CASES[name]
                told: dict[str, Any] = {}
                for dtype in TOLERANCE:
                    chunk = chunk_of(on(config), groups, dtype)
                    wanted = at_once(chunk, tokens)
                    num_first = BEGINNING[dtype]
                    logits, cache = continued(chunk, tokens, num_first)
                    told[f"error, {dtype}"] = error(logits, wanted[:, num_first - 1 :]) / TOLERANCE[dtype]
                    told[f"bytes, {dtype}"] = cache.bytes_per_token
                    # It is what came before that the last token's logits are made of.
                    alone = at_once(chunk, tokens[:, -1:])
                    told["of itself"] = error(alone[:, -1], wanted[:, -1])
                chunk = chunk_of(on(config), groups, torch.bfloat16)
                told["bytes, bf16"] = continued(chunk, tokens[:1], LENGTH)[1].bytes_per_token
                found[name] = told
        return found

    (found,) = run_ranks(main, 1, timeout_s=400)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", OF_SHARE)
def test_logits_are_those_of_the_whole_text(told: dict[str, dict[str, Any]], case: str) -> None:
    for dtype in TOLERANCE:
        assert told[case][f"error, {dtype}"] <= 1
    assert told[case]["of itself"] > 1e-2


@pytest.mark.parametrize("case", OF_SHARE)
def test_bytes_are_those_of_the_formula(told: dict[str, dict[str, Any]], case: str) -> None:
    model = CASES[case].model
    # The cache is that of two sequences.
    assert told[case]["bytes, torch.float64"] == 2 * cached_bytes_per_token(model, 8)
    assert told[case]["bytes, torch.float32"] == 2 * cached_bytes_per_token(model, 4)
    assert told[case]["bytes, bf16"] == cached_bytes_per_token(model, 2)


def what_passed(memory: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """A list that gets what the memory is given, and what it makes of it."""
    passed: list[tuple[Tensor, Tensor]] = []
    memory.register_forward_hook(lambda _, given, made: passed.append((given[0], made)))
    return passed


MIXED = ("move", "lave", "move, one key/value head, gated", "latents, move", "latents, move for values alone")


def test_what_is_mixed_into_values_is_in_the_cache(run_ranks: Any) -> None:
    """Nothing is mixed again when a token is read."""

    def main() -> int:
        tokens = some_tokens()
        with joined(on(SHARED)) as groups:
            for name in MIXED:
                chunk = chunk_of(on(CASES[name]), groups, torch.float64)
                passes = {
                    number: what_passed(block.self_attention.memory)
                    for number, block in enumerate(chunk.decoder.layers, start=1)
                    if hasattr(block.self_attention, "memory")
                }
                _, cache = continued(chunk, tokens, 6)
                assert len(passes) == chunk.model_config.num_memory_layers
                for number, seen in passes.items():
                    given, made = (torch.cat(parts) for parts in zip(*seen, strict=True))
                    assert len(seen) == LENGTH - 6 + 1
                    assert error(given, made) > 1e-2
                    *_, values = cache.of_layer(number)
                    assert torch.equal(values[..., : made.shape[-1]], made)
        return len(MIXED)

    assert run_ranks(main, 1) == [len(MIXED)]


def test_values_that_are_expanded_once_give_the_same_logits(run_ranks: Any) -> None:
    """The expanded values take the bytes of the formula."""

    def main() -> dict[str, float]:
        found = {}
        config, tokens = on(CASES["midus"]), some_tokens()
        with joined(config) as groups:
            # In bf16 rounding may select other rows.
            for dtype, tolerance in (TOLERANCE | {torch.bfloat16: 0.2}).items():
                chunk = chunk_of(config, groups, dtype)
                wanted = at_once(chunk, tokens)
                num_bytes = 0
                for layer in chunk.memory_layers:
                    layer.expand_values()
                    num_bytes += layer.own_values.nbytes  # type: ignore[union-attr]
                assert num_bytes == expanded_bytes(config.model, dtype.itemsize)
                logits, _ = continued(chunk, tokens, 4)
                found[str(dtype)] = error(logits, wanted[:, 3:]) / tolerance
        return found

    (found,) = run_ranks(main, 1)
    assert max(found.values()) <= 1, found


SPLIT = (
    "ultramem_v2, activated",
    "move in blocks of engram",
    "tide, no gain, in blocks of mome by n-grams",
    "engram beside learned keys",
    "latents, move for values alone",
)
"""Texts' models with tables that two ranks split: every way to read one."""
TEXTS = (
    "ultramem_v2, activated",
    "midus",
    "move in blocks of engram",
    *OF_TWO_KINDS,
    "lave in blocks of stem",
    "lave in blocks of residuals",
    "engram beside learned keys",
    "latents, move for values alone",
    "skips",
    "experts",
)


def test_texts_are_the_same_with_and_without(run_ranks: Any) -> None:
    """Greedy and sampled, beyond the length of the context, with a separator in the prompt; on one rank, and sampled with
    tables that two split."""

    def texts(config: RunConfig, groups: ParallelGroups, *, cached: bool) -> list[list[int]]:
        chunk = chunk_of(config, groups, torch.float64)
        prompt = [5, 9, VOCAB_SIZE - 1, 17, 3]
        return [
            list(
                generate(
                    chunk,
                    prompt,
                    max_tokens=LENGTH,
                    context_tokens=LENGTH,
                    vocab_size=VOCAB_SIZE,
                    eod=VOCAB_SIZE - 1,
                    sampling=Sampling(temperature, 1.0),
                    group=groups.megatron.ep,
                    cached=cached,
                )
            )
            for temperature in ((0, 1.0) if groups.world_size == 1 else (1.0,))
        ]

    def main(memory: int) -> dict[str, list[list[list[int]]]]:
        found = {}
        for name in in_rotation(TEXTS if memory == 1 else SPLIT):
            config = on(CASES[name], memory=memory)
            with joined(config) as groups:
                found[name] = [texts(config, groups, cached=cached) for cached in (True, False)]
        return found

    (alone,) = run_ranks(lambda: main(1), 1)
    for with_cache, without in alone.values():
        assert with_cache == without
        assert max(map(len, with_cache)) > LENGTH - 5
    for rank in run_ranks(lambda: main(2), 2):
        for with_cache, without in rank.values():
            assert with_cache == without


def test_what_does_not_fit_is_refused() -> None:
    cache = KeyValueCache(4)
    cache.extend(1, torch.zeros(2, 1, 3))
    cache.advance(2)
    for num_new in (2, 3):
        with pytest.raises(ValueError, match="one at a time"):
            cache.extend(1, torch.zeros(num_new, 1, 3))
    assert [len(x) for x in cache.extend(1, torch.ones(1, 1, 3))] == [3]
