"""Models with latent attention that are refused, with key, value and fix; and formats that have no place for one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import LatentAttentionConfig, ModelConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.move.config import MoveConfig
from megamem.placement.slots import Slot
from pretrain.config.schema import RunConfig
from pretrain.convert.released.pairs import released_pairs
from pretrain.errors import ConfigError
from tests.families.behind_heads.config import HEADS
from tests.plain_config import parse_config

LATENT = ModelConfig(hidden_size=32, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=4))
MOVE = MoveConfig(value_dim=12, num_gate_heads=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_attention": LatentAttentionConfig(12, 3)}, "rotary_dim is 3: RoPE needs an even number of columns"),
        ({"latent_attention": LatentAttentionConfig(12, 8)}, "rotary_dim is 8: .* fewer than the 8 of a head"),
        ({"implementation": "transformer_engine"}, "implementation is transformer_engine, but .*implementation: local"),
        ({"num_query_groups": 2}, "num_query_groups is 2, .* leave num_query_groups out"),
        ({"rotary_scaling": RotaryScalingConfig("yarn")}, "rotary_scaling.kind is yarn, .* use ntk, linear or llama3"),
        ({"memory": replace(MOVE, value_dim=24)}, "value_dim is 24, but .*latent has 12 columns: .*value_dim: 12"),
        (
            {"memory": replace(MOVE, num_gate_heads=5)},
            "num_gate_heads is 5, .* does not divide value_dim = 12: use one",
        ),
        (
            {"memory": MoveConfig(value_dim=32, mixed_into="latents"), "latent_attention": None},
            "mixed_into is latents, but model.latent_attention is null: set it, or use mixed_into: values",
        ),
        (
            {"memory": MidusConfig(num_heads=4)},
            "kind is midus, whose memories read the outputs of plain attention's heads: set model.latent_attention: null",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.(latent_attention\.|memory\.)?{message}"):
        replace(LATENT, **change)


def test_keys_that_latents_leave_without_effect_are_refused() -> None:
    for key, value in (("rotary_base", 500), ("rotary_scaling", {"kind": "linear"})):
        tree = {"model": {"latent_attention": {"rotary_dim": 0}, key: value}}
        message = f"model.{key} has no effect unless latent_attention.rotary_dim is above 0"
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse_config(tree, RunConfig)


def test_a_format_without_latents_says_so() -> None:
    model = replace(LATENT, vocab_size=64)
    with pytest.raises(ConfigError, match="has no models with latent attention: use the native format"):
        released_pairs(model, {}, "ultramemv2")


def test_a_head_behind_latents_is_no_place_for_a_memory() -> None:
    class OnHeads(MoveConfig):
        slot: ClassVar[Slot | None] = HEADS

    with pytest.raises(
        ValueError, match=r"kind is move, whose memories read the outputs .*: set model.latent_attention: null"
    ):
        replace(LATENT, memory=OnHeads(value_dim=12, num_gate_heads=3))
