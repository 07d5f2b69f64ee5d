"""The shipped models whose memories the token addresses have the parameters that the papers print."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.planning.counts.formulas import count_parameters

REPOSITORY = Path(__file__).parents[2]
# File, its override, what was computed, and what is printed.
ROWS = re.findall(
    r"^\| `(configs/(?:move|lave)/\w+\.yaml)`(?: `([^`]+)`)? \| ([\d,.]+)M \| (?:([\d.]+)([MB])|-) \|$",
    (REPOSITORY / "docs" / "parameters.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
# Cut off instead of rounded.
CUT_OFF = {("configs/move/d32_x1.yaml", "")}


def test_the_page_has_all_of_them() -> None:
    shipped = {path for kind in ("move", "lave") for path in (REPOSITORY / "configs" / kind).glob("d*.yaml")}
    assert {REPOSITORY / path for path, *_ in ROWS} == shipped
    # D12, D20 and D32, of attention's values and over latents, of which D32's are not printed.
    assert len(ROWS) == (9 + 6) + (6 + 6 + 4) + 1
    assert [path for path, *_, printed, _ in ROWS if not printed] == ["configs/move/d32_mla_x1.yaml"]


@pytest.mark.parametrize(("depth", "computed", "printed"), [(12, "172.36", "172"), (20, "499.35", "499")])
def test_backbones_over_latents_are_as_large_as_is_printed(depth: int, computed: str, printed: str) -> None:
    counts = count_parameters(load_config(REPOSITORY / f"configs/move/d{depth}_mla_x1.yaml").model)
    backbone = (counts.total - counts.tables - counts.memory_projections) / 1e6
    assert (f"{backbone:.2f}", f"{backbone:.0f}") == (computed, printed)
    assert f"{computed}M (D{depth})" in (REPOSITORY / "docs" / "parameters.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "override", "computed", "printed", "unit"), ROWS)
def test_a_memory_adds_as_many_parameters_as_are_printed(
    path: str, override: str, computed: str, printed: str, unit: str
) -> None:
    config = load_config(REPOSITORY / path, [override] if override else [])
    validate(config, None)
    counts = count_parameters(config.model)
    added = counts.tables + counts.memory_projections
    assert f"{added / 1e6:,.2f}" == computed
    if not printed:
        return
    digits, scale = len(printed.partition(".")[2]), {"M": 1e6, "B": 1e9}[unit]
    rounded = f"{added / scale:.{digits}f}"
    if (path, override) in CUT_OFF:
        assert printed == str(int(added / scale * 10**digits) / 10**digits) != rounded
    else:
        assert printed == rounded


@pytest.mark.parametrize(("num_tables", "gigabytes"), [(8, "4.2027"), (2, "1.0507"), (24, "12.6081")])
def test_tides_tables_have_the_printed_sizes(num_tables: int, gigabytes: str) -> None:
    config = load_config(REPOSITORY / "configs" / "tide" / "1b.yaml", [f"model.memory.num_tables={num_tables}"])
    validate(config, None)
    assert f"{2 * count_parameters(config.model).tables / 1e9:.4f}" == gigabytes


@pytest.mark.parametrize("name", ["750m", "1b", "3b"])
def test_tides_backbones_are_those_of_the_page(name: str) -> None:
    model = load_config(REPOSITORY / "configs" / "tide" / f"{name}.yaml").model
    counts = count_parameters(model)
    page = (REPOSITORY / "docs" / "parameters.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `configs/tide/{name}\.yaml`[^|]*\| (.*) \|$", page, re.MULTILINE)
    assert row.split(" | ") == [
        f"{model.num_layers}",
        f"{model.hidden_size:,}",
        f"{model.ffn_hidden_size:,}",
        f"{model.num_attention_heads}, {model.num_query_groups}",
        f"{(counts.total - counts.tables) / 1e9:.3f}B",
        f"{2 * counts.tables / 1e9:.2f} GB",
    ]


STEM = REPOSITORY / "configs" / "stem" / "350m.yaml"


@pytest.mark.parametrize(
    ("shown", "placement"),
    [
        (" `model.memory.placement.every=3`", "every: 3"),
        ("", "every: 2"),
        (", all but the first", f"blocks: {list(range(1, 32))}"),
    ],
)
def test_stems_model_is_that_of_the_page(shown: str, placement: str) -> None:
    config = load_config(STEM, [f"model.memory.placement={{{placement}}}"])
    validate(config, None)
    counts = count_parameters(config.model)
    page = (REPOSITORY / "docs" / "parameters.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `configs/stem/350m\.yaml`{re.escape(shown)} \| (.*) \|$", page, re.MULTILINE)
    layers, computed, active, printed = row.split(" | ")
    assert [layers, computed, active] == [
        f"{config.model.num_memory_layers}",
        f"{counts.total / 1e9:.3f}B",
        f"{counts.active / 1e9:.3f}B",
    ]
    # A third of the layers alone is as large as is printed.
    assert (f"{counts.total / 1e9:.2f}B" == printed) == (placement == "every: 3")
    assert f"{count_parameters(load_config(STEM, ['model.memory=null']).model).total / 1e6:.0f}M" in page


def test_what_is_said_of_tides_backbone() -> None:
    """The backbone without tables: as shipped, and as narrow as its paper's 1.03 GB of 8 bits would have it, with and
    without the embedding."""
    model = load_config(REPOSITORY / "configs" / "tide" / "1b.yaml").model
    sizes = {}
    for width in (model.ffn_hidden_size, 3520, 5248):
        counts = count_parameters(replace(model, ffn_hidden_size=width))
        sizes[width] = (counts.total - counts.tables, counts.total - counts.tables - counts.embedding)
    assert [f"{sizes[8192][0] / 1e9:.3f}", f"{sizes[3520][0] / 1e9:.2f}", f"{sizes[5248][1] / 1e9:.2f}"] == [
        "1.723",
        "1.03",
        "1.03",
    ]
    page = (REPOSITORY / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert "1.723B parameters without tables" in page
    assert "of 3,520 columns, or of 5,248" in page


def test_ngrams_in_values_have_the_published_rows() -> None:
    """300M rows asked for, of 32 columns per layer, 128 wide for a token's four hashes (nanochat's pull request 854)."""
    model = load_config(REPOSITORY / "configs" / "value_ngrams" / "d24.yaml").model
    (memory,) = model.memories
    assert [layer.span.read for layer in model.memory_layers] == [3, 7, 11, 15]
    assert [bank.num_rows for bank in model.memory_plan.banks] == [299_999_977] * 4
    assert memory.lookup.rows * memory.width("values") == 128
    assert count_parameters(model).tables == 4 * 299_999_977 * 32
