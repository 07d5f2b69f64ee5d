"""Controls of a comparison: what they change, what they leave alone, and what their losses are said to mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lab.analysis.losses import reading_others
from lab.studies.compare.addresses import Addresses
from lab.studies.compare.controls import (
    MEANINGS,
    NEEDED,
    controls_of,
    controls_section,
    distinct,
    trained_once,
    verdict,
)
from lab.studies.compare.leads import leads, leads_picture
from lab.studies.compare.runs import RunResult
from megamem.banks.controls import others
from pretrain.config.keys import ineffective_fields
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token
from tools.common.drawing import svg
from tools.common.metrics import Curves

TUNED = Path(__file__).parents[2] / "configs" / "compare" / "tuned"
VOCAB_SIZE = 4096
NAMES = ("engram", "engram_ple", "lave", "memory_plus", "move", "pkm", "tide", "ultramem", "ultramemv2")


def runs(*losses: float) -> list[RunResult]:
    return [RunResult(loss, loss / 2, Curves((), (), {}, {}, None), (0.2, 0.25, 9.0)) for loss in losses]


def loaded(name: str) -> RunConfig:
    return load_config(TUNED / f"{name}.yaml", [f"model.vocab_size={VOCAB_SIZE}"])


@pytest.mark.parametrize("name", NAMES)
def test_every_control_can_be_trained_and_has_the_model_s_settings(name: str) -> None:
    config = loaded(name)
    found = controls_of(config, VOCAB_SIZE)
    assert set(found.controls) == set(MEANINGS)
    assert not found.left_out
    for what, control in found.controls.items():
        validate(control, 2)
        assert control.name == f"{name}.{what}"
        assert all(item.at_default for item in ineffective_fields(control)), what
        for key in ("lr", "warmup_steps", "weight_decay", "beta2"):
            assert getattr(control.optimizer, key) == getattr(config.optimizer, key)
        assert (control.train, control.data, control.data_seed) == (config.train, config.data, config.data_seed)


@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_that_the_data_brings_is_counted(name: str) -> None:
    config = load_config(TUNED / f"{name}.yaml", [])
    assert config.model.vocab_size is None
    named, brought = (controls_of(each, VOCAB_SIZE).controls for each in (loaded(name), config))
    for what, control in brought.items():
        assert control.model == replace(named[what].model, vocab_size=None)


@pytest.mark.parametrize("name", NAMES)
def test_controls_cost_what_they_are_to_cost(name: str) -> None:
    config = loaded(name)
    controls = controls_of(config, VOCAB_SIZE).controls

    def flops(run: RunConfig) -> float:
        return forward_flops_per_token(run.model, config.train.sequence_length)

    own = count_parameters(config.model)
    for what in ("one_row", "random_rows", "others_rows"):
        assert count_parameters(controls[what].model) == own
        assert flops(controls[what]) == flops(config)
    assert flops(controls["equal_flops"]) == pytest.approx(flops(config), rel=0.005)
    assert count_parameters(controls["equal_parameters"].model).total == pytest.approx(own.total, rel=0.005)
    experts = count_parameters(controls["experts"].model)
    assert (experts.total, experts.active) == (pytest.approx(own.total, rel=0.02), pytest.approx(own.active, rel=0.01))


def test_some_controls_alone_stand_in_the_section() -> None:
    some = controls_of(loaded("pkm"), VOCAB_SIZE, ["experts", "one_row"])
    assert list(some.controls) == ["one_row", "experts"]
    text = controls_section([some], {}, {}, {})
    assert "| model | as it is | one_row | experts | after training: others' rows |" in text
    assert "random_rows" not in text


def test_a_control_that_models_have_in_common_is_trained_once() -> None:
    each = [controls_of(loaded(name), VOCAB_SIZE, ["one_row", "equal_flops"]) for name in ("pkm", "peer", "engram")]
    faster = replace(each[2].model, optimizer=replace(each[2].model.optimizer, lr=0.5))
    pkm, peer, other = trained_once([*each[:2], controls_of(faster, VOCAB_SIZE, ["one_row", "equal_flops"])])
    # Their twins are the same; the third's has another rate, and rows belong to their models.
    assert peer.controls["equal_flops"] is pkm.controls["equal_flops"]
    assert (pkm.shared, peer.shared, other.shared) == ({}, {"equal_flops": "pkm.equal_flops"}, {})
    found = distinct([pkm, peer, other])
    assert [control.name for control in found] == [
        "pkm.one_row",
        "pkm.equal_flops",
        "peer.one_row",
        "engram.one_row",
        "engram.equal_flops",
    ]
    losses = {control.name: runs(3.0 + index / 10) for index, control in enumerate(found)}
    text = controls_section([pkm, peer], {}, losses, {})
    assert "| peer | - | 3.2000 | 3.1000 | - | - |" in text
    assert "- equal_flops of peer is pkm.equal_flops, trained once: the same but for its name." in text
    assert leads([peer], {"peer": runs(2.9)}, losses)["peer"]["equal_flops"] == pytest.approx([0.2])


def test_leads_are_paired_by_seed_and_drawn() -> None:
    controlled = controls_of(loaded("pkm"), VOCAB_SIZE)
    of_controls = {"pkm.one_row": runs(3.4, 3.5), "pkm.experts": runs(2.9)}
    found = leads([controlled], {"pkm": runs(3.0, 3.2)}, of_controls)
    assert set(found["pkm"]) == set(MEANINGS)
    assert found["pkm"]["one_row"] == pytest.approx([0.4, 0.3])
    assert found["pkm"]["experts"] == pytest.approx([-0.1])
    assert found["pkm"]["equal_flops"] == []
    drawn = svg(leads_picture(found))
    for words in ("pkm", "one_row", "experts", "nats per token ahead of the control"):
        assert f">{words}</text>" in drawn
    assert "equal_flops" not in drawn


def test_random_rows_stay() -> None:
    optimizer = controls_of(loaded("ultramemv2"), VOCAB_SIZE).controls["random_rows"].optimizer
    assert (optimizer.value_lr, optimizer.value_weight_decay) == (0.0, 0.0)


def test_a_dense_model_and_a_control_have_none() -> None:
    with pytest.raises(ConfigError, match="dense has no memory, and so no controls"):
        controls_of(loaded("dense"), VOCAB_SIZE)
    with pytest.raises(ConfigError, match=r"model\.memory\.control one_row"):
        controls_of(controls_of(loaded("pkm"), VOCAB_SIZE).controls["one_row"], VOCAB_SIZE)


def test_one_sequence_has_no_others() -> None:
    config = controls_of(loaded("pkm"), VOCAB_SIZE).controls["others_rows"]
    one = replace(config, train=replace(config.train, micro_batch_size=1))
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size is 1, so that no other sequence asks for rows"):
        validate(one, 2)


def test_no_token_reads_what_a_later_one_of_its_sequence_asks_for() -> None:
    """Or any other of it."""
    places, sequences = 5, 3
    sequence_of = torch.arange(sequences).expand(places, -1)
    assert not others(sequence_of.flatten()).view(places, sequences).eq(sequence_of).any()


def test_a_reader_that_chunks_share_reads_others_rows_once() -> None:
    def rows_of(bank: Mock) -> list[int]:
        found: list[int] = bank.read.call_args.args[0].flatten().tolist()
        return found

    bank, rows = Mock(), torch.arange(3).unsqueeze(1)
    shared = Mock(lookup=bank)
    chunks: list[Any] = [SimpleNamespace(memory_layers=[], read_together=[shared]) for _ in range(2)]
    with reading_others(chunks):
        shared.lookup.read(rows, rows, None)
        assert rows_of(bank) == [2, 0, 1]
    assert shared.lookup is bank


def test_verdicts() -> None:
    beaten = {name: [3.2, 3.3] for name in NEEDED}
    assert verdict([3.0, 3.1], beaten).startswith(
        "memory: it beats one_row, random_rows, others_rows and equal_flops with every seed (ahead of one_row by +0.2"
    )
    close = {**beaten, "one_row": [3.2, 3.05], "experts": [2.9, 2.9]}
    words = verdict([3.0, 3.1], close)
    assert words.startswith("not shown to be memory, as it does not beat one_row with every seed")
    assert "not ahead of one_row by +0.0750, experts by -0.1500" in words
    assert "Rows bring +0.0750, the least lead over one_row, random_rows and others_rows." in words
    assert "Rows bring" not in verdict([3.0], {"one_row": [3.2]})
    assert "One seed says little" in verdict([3.0], {name: [3.2] for name in NEEDED})
    assert verdict([3.0], {"one_row": [3.2]}).startswith("not judged, without random_rows, others_rows, equal_flops (")


def test_the_section_has_means_and_verdicts_of_what_is_done() -> None:
    controlled = controls_of(loaded("pkm"), VOCAB_SIZE)

    own, after = (
        {"pkm": runs(3.0, 3.2)},
        {"pkm": [Addresses(3.0, 4.0, 3.5, (0.5, None)), Addresses(3.2, 4.2, 3.7, (0.7, None))]},
    )
    of_controls = {control.name: runs(3.4, 3.6) for control in controlled.controls.values()}
    text = controls_section([controlled], own, of_controls, after)
    assert f"| pkm | 3.1000 |{' 3.5000 |' * len(MEANINGS)} 4.1000 | 3.6000 |" in text
    assert f"| pkm | 0.250 |{' 0.250 |' * len(MEANINGS)}" in text
    assert "- **pkm**: memory: it beats" in text
    assert "| pkm | +0.600 | - |" in text
    partly = controls_section([controlled], own, {"pkm.one_row": runs(3.4)}, {})
    assert "No model and all of its controls are done yet." in partly
    assert "| pkm | 3.1000 | 3.4000 | - |" in partly
