"""Overrides of a grown model's configuration: which are taken, and what is said of the others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from pretrain.growth.config import grown_config
from pretrain.growth.plan import Method, grown_blocks

_DEFAULT = RunConfig(name="base")
BASE = replace(
    _DEFAULT,
    model=replace(_DEFAULT.model, num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, memory=None),
)
KIND = "model.memory.kind=midus"
HEADS = "model.memory.num_heads=4"


def grown(*overrides: str, insert: Method = "memory") -> RunConfig:
    blocks = grown_blocks(insert, num_layers=4, num_inserted=2)
    return grown_config(BASE, blocks, overrides, name="grown", origin="runs/base")


REFUSED = [
    (
        ["kind=move"],
        "kind=move: a grown model takes model.memory.<key> and seed alone: did you mean model.memory.kind=m",
    ),
    (["memory.top_k=3"], "did you mean model.memory.top_k=3?"),
    (["model.memroy.kind=midus"], "did you mean model.memory.kind=midus?"),
    (["sed=4"], "did you mean seed=4?"),
    ([KIND, "model.hidden_size=64"], "seed alone; give other keys to the run that trains it"),
    ([KIND, "train.num_step=3"], "train.num_step=3: a grown model takes model.memory.<key> and seed alone; give other"),
    (
        [KIND, HEADS, "model.memory.placement.blocks=[0]"],
        "placement.blocks=[0]: --blocks, --insert and --placement say",
    ),
    ([KIND, "model.memory.placement={every: 2}"], "placement={every: 2}: --blocks, --insert and --placement say where"),
    ([KIND, "model.memory.num_heads=3"], "override model.memory.num_heads=3: model.memory.num_heads is 3, but"),
    (
        ["model.memory.kind=peer", "model.memory.value_dim=32"],
        "override model.memory.value_dim=32: model.memory.placem",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_what_was_given_is_named_with_what_was_meant(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grown(*overrides)
    assert said in str(caught.value)
    # Blames none that nobody gave.
    assert "override model.memory.placement" not in str(caught.value)


def test_without_a_memory_its_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"as no memory is inserted: leave it out, or use --insert memory"):
        grown(KIND, insert="solar")
    with pytest.raises(ConfigError, match=r"did you mean seed=7\?"):
        grown("seeed=7", insert="llama-pro")
    assert grown("seed=7", insert="averaged").seed == 7


def test_placement_follows_from_the_blocks() -> None:
    memory = grown(KIND, HEADS, "seed=9", "model.memory.placement.norm=layer").model.memory
    assert memory is not None
    assert (memory.kind, memory.placement.blocks, memory.placement.norm) == ("midus", (1, 4), "layer")
    linear = ("model.memory.kind=linear_memory", "model.memory.num_rows=50", "model.memory.value_dim=32")
    inserted = grown(*linear).model.memory
    assert inserted is not None
    assert (inserted.placement.blocks, inserted.placement.position) == ((1, 4), "inserted")


def test_a_configuration_is_grown_without_torch() -> None:
    program = "import sys, pretrain.growth.config; assert not {'torch', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
