"""Backbones whose norms and rotations are Triton's, in its interpreter: losses, every gradient, and what a cache gives, against
PyTorch's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_kv_cache import BEGINNING, chunk_of, continued, dense, error, places, some_tokens
from tiny_runs import SHARED, joined, on
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import LatentAttentionConfig, MultiTokenConfig
from megamem.model import MemoryGPTModel
from pretrain.config.schema import RunConfig

pytestmark = pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
TOLERANCE = 5e-6
# Of a backbone's blocks, which are all alike: the interpreter takes a second for each.
of_one, of_two = partial(dense, num_layers=1), partial(dense, num_layers=2)
CASES = {
    "grouped heads": of_two(),
    "one key": of_one(num_query_groups=1),
    "without norms of queries and keys": of_one(qk_norm=False),
    "latents": of_one(
        num_query_groups=None, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=4, query_latent_dim=8)
    ),
    "latents without rotary columns": of_one(
        num_query_groups=None, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=0)
    ),
    "yarn": of_one(rotary_scaling=RotaryScalingConfig("yarn", factor=4.0, original_length=8)),
    "separate documents": replace(of_one(), data=replace(SHARED.data, documents="separate")),
    "recomputation": replace(of_two(), train=replace(SHARED.train, recompute="full")),
    "further tokens": of_one(multi_token_prediction=MultiTokenConfig(depth=1)),
}


def built(config: RunConfig, groups: Any, kernels: Implementation) -> MemoryGPTModel:
    train = replace(config.train, kernels=kernels)
    return chunk_of(on(replace(config, train=train), recompute=config.train.recompute), groups, torch.float32)


def losses_and_gradients(chunk: MemoryGPTModel, *, further: bool) -> dict[str, Tensor]:
    tokens = some_tokens()
    positions = places(tokens, 0)
    if chunk.separate_documents:
        # The second sequence's positions start anew.
        positions = positions.clone()
        positions[1, 5:] -= 5
    labels = torch.stack((tokens, tokens.roll(-1, 1))) if further else tokens
    chunk.train()
    losses = chunk(tokens, positions, None, labels=labels)
    losses.sum().backward()
    found = {name: weight.grad for name, weight in chunk.named_parameters() if weight.grad is not None}
    chunk.eval()
    return {"losses": losses.detach(), **found}


@pytest.fixture(scope="module")
def errors(run_ranks: Any) -> dict[str, dict[str, float]]:
    """Errors over the largest element, by case and what is compared."""

    def main() -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        with joined(on(SHARED)) as groups:
            for name, config in CASES.items():
                further = config.model.multi_token_prediction is not None
                ours, torchs = (built(config, groups, kernels) for kernels in ("triton", "torch"))
                assert ours.decoder.final_layernorm.normalise.__module__ == "kernels.rms_norm.triton_op"
                own, expected = (losses_and_gradients(chunk, further=further) for chunk in (ours, torchs))
                assert own.keys() == expected.keys()
                found[name] = {what: error(own[what], expected[what]) for what in own}
                logits = [continued(chunk, some_tokens(), BEGINNING[torch.float32])[0] for chunk in (ours, torchs)]
                found[name]["continued"] = error(*logits)
        return found

    (found,) = run_ranks(main, 1, timeout_s=400)
    return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_a_backbone_is_pytorchs_to_rounding(errors: dict[str, dict[str, float]], name: str) -> None:
    found = errors[name]
    assert {"losses", "continued", "decoder.final_layernorm.weight"} <= set(found)
    heads = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert (heads in found) == (name not in ("without norms of queries and keys", "latents without rotary columns"))
    assert {what: off for what, off in found.items() if not off <= TOLERANCE} == {}
