"""The shipped models with inserted blocks have the parameters that the paper prints, and stand where it says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megamem.config.model import ModelConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.growth.placement import anchors, positions
from pretrain.planning.counts.attention import expanded_bytes
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs" / "midus"
ROWS = re.findall(
    r"^\| `(configs/midus/\w+\.yaml)`, ([\w ]+) \| ([\d,]+) \| ([\d.]+B)? ?\|$",
    (REPOSITORY / "docs" / "parameters.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def base_of(grown: ModelConfig) -> ModelConfig:
    """The pretrained model."""
    return replace(grown, num_layers=grown.num_layers - grown.num_memory_layers, memory=None)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_blocks_stand_where_the_paper_says(path: Path) -> None:
    config = load_config(path)
    validate(config, None)
    model = config.model
    found = anchors("distributed", num_layers=base_of(model).num_layers, num_inserted=model.num_memory_layers)
    assert model.memory is not None
    assert model.memory.placement.blocks == positions(found, after=False)
    assert config.optimizer.trained_layers == tuple(block + 1 for block in model.memory.placement.blocks)
    # Half as many as there were.
    assert model.num_memory_layers * 3 == model.num_layers


def test_values_that_are_expanded_for_inference_are_priced() -> None:
    """16 blocks of 32 heads with 4,096 values of 128 columns each: 0.54 GB in bf16."""
    assert expanded_bytes(load_config(CONFIGS / "8b.yaml").model, 2) == 16 * 32 * 4096 * 128 * 2 == 536_870_912


def test_the_page_has_all_of_them() -> None:
    assert [(path, what) for path, what, *_ in ROWS] == [
        ("configs/midus/8b.yaml", "pretrained"),
        ("configs/midus/8b.yaml", "blocks of memory"),
        ("configs/midus/8b.yaml", "copies of blocks"),
        ("configs/midus/1b.yaml", "blocks of memory"),
        ("configs/midus/8b_linear.yaml", "blocks of memory"),
        ("configs/midus/8b_pkm.yaml", "blocks of memory"),
        ("configs/midus/8b_ultramem.yaml", "blocks of memory"),
    ]


@pytest.mark.parametrize(("path", "what", "computed", "printed"), ROWS)
def test_as_many_parameters_are_added_as_are_printed(path: str, what: str, computed: str, printed: str) -> None:
    grown = load_config(REPOSITORY / path).model
    base = base_of(grown)
    model = {"blocks of memory": grown, "copies of blocks": replace(base, num_layers=grown.num_layers)}.get(what)
    added = count_parameters(base).total
    if model is not None:
        added = count_parameters(model).total - added
    assert f"{added:,}" == computed
    if printed:
        assert f"{added / 1e9:.2f}B" == printed


def test_what_a_block_of_memory_computes() -> None:
    """11.9 % of a copied block, without attention's scores and sums: queries, keys and values, scores, expansions."""
    grown = load_config(CONFIGS / "8b.yaml").model
    base, number = base_of(grown), grown.num_memory_layers
    flops = [forward_flops_per_token(model, 1) for model in (base, grown)]
    copies = forward_flops_per_token(replace(base, num_layers=grown.num_layers), 1)
    # The token attends to itself alone.
    scores = 4 * grown.hidden_size * number
    share = (flops[1] - flops[0] - scores) / (copies - flops[0] - scores)
    assert share == pytest.approx(0.119, abs=0.001)


def test_heads_that_are_not_as_wide_as_the_model_are_refused() -> None:
    for override, message in (
        ("model.memory.num_heads=16", r"model\.memory\.num_heads is 16, but hidden_size = 4096 is made of 32 heads"),
        ("model.head_dim=64", r"32 heads of 64 columns are not hidden_size = 4096 wide"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(CONFIGS / "8b.yaml", [override])
