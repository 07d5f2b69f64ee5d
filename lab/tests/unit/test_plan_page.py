"""The page about plans says what is computed."""

from __future__ import annotations

from pathlib import Path

from lab.maintenance.plan_page import (
    FEWER,
    GPUS,
    MODELS,
    OF_FEW_GPUS,
    PLANS,
    UPDATES,
    Planned,
    against_mixture,
    fewest,
    markdown_table,
    marks,
    rows_of,
)
from pretrain.config.stages import load_config
from pretrain.planning.seconds.hardware import load_hardware
from tools.plan.layouts import all_estimates, recommended

REPOSITORY = Path(__file__).parents[3]
MODEL_FOLDER = REPOSITORY / "configs" / "ultramemv2"
PAGE = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
H100 = load_hardware("h100-80g")


def test_the_page_says_what_is_computed() -> None:
    begin, end = marks(PLANS)
    computed = PAGE.partition(begin)[2].partition(end)[0]
    name, file = list(MODELS.items())[-1]
    config = load_config(MODEL_FOLDER / file)
    found = all_estimates(config, GPUS[-1], H100)
    best = recommended(found, H100)
    assert best is not None
    plan = Planned(GPUS[-1], found, best)
    of_model = computed.partition(f"## UltraMemV2-{name}\n")[2].partition("\n## ")[0]
    shown = {cells[1].strip(): cells[-2].strip() for line in of_model.splitlines() if len(cells := line.split("|")) > 3}
    for row in rows_of(config, [plan], H100):
        assert shown[row[0]] == row[1]
    for line in markdown_table(against_mixture(GPUS[-1:], H100)):
        assert line in computed


def test_the_page_says_how_few_gpus_are_enough() -> None:
    begin, end = marks(FEWER)
    model = "1.25B/12.5B"
    shown = {line.split("|")[1].strip(): line for line in PAGE.partition(begin)[2].partition(end)[0].splitlines()[1:]}
    assert shown[model] == f"| {model} | " + " | ".join(fewest(model, update, H100) for update in UPDATES) + " |"
    assert {*OF_FEW_GPUS} <= {*shown}
