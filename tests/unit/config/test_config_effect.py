"""Options without effect: refused where somebody asked for them, dropped where they were inherited."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from megamem.config.base import Config, EffectiveWhen
from megamem.config.model import ModelConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.pkm.family import PKM
from megamem.families.registry import FAMILIES
from megamem.placement.slots import Slot
from megamem.placement.spans import PlacementConfig
from pretrain.config.keys import RUN_RULES, all_keys, ineffective_fields
from pretrain.config.loader import load_as
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tests.families.behind_heads.config import HEADS
from tests.plain_config import parse_config

SUFFIX = "remove it, or make that condition true"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or [])
    return str(caught.value)


def test_the_named_file_may_not_set_one(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "optimizer:\n  schedule: cosine\n  decay_steps: 5\n")
    expected = f"{path}:3: optimizer.decay_steps has no effect unless optimizer.schedule is wsd: {SUFFIX}"
    assert refusal(path) == expected
    assert refusal(path, ["seed=3"]) == expected, "an override elsewhere must not hide it"


def test_a_value_equal_to_the_default_is_refused_too(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "parallel: {virtual_pipeline: 1}")
    assert "parallel.virtual_pipeline has no effect unless parallel.pipeline is above 1" in refusal(path)


def test_an_override_may_not_set_one(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "seed: 1")
    assert refusal(path, ["optimizer.decay_steps=5"]).startswith(
        "override optimizer.decay_steps=5: optimizer.decay_steps has no effect unless optimizer.schedule is wsd"
    )


def test_an_override_may_take_the_effect_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "optimizer: {schedule: wsd, decay_steps: 5}")
    config = load_config(path, ["optimizer.schedule=constant"])
    assert config.optimizer.decay_steps == 0


def test_an_override_may_give_effect_to_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "optimizer: {decay_steps: 5}")
    assert "decay_steps" in refusal(path)
    assert load_config(path, ["optimizer.schedule=wsd"]).optimizer.decay_steps == 5


def test_a_file_that_its_overrides_mend_counts_as_a_base(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "optimizer: {decay_steps: 5}\nmodel: {num_layers: 0}")
    assert load_config(path, ["model.num_layers=2"]).optimizer.decay_steps == 0


def test_inherited_values_fall_back_to_their_defaults(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "optimizer: {schedule: wsd, decay_steps: 5, min_lr: 1e-5}")
    config = load_config(write(tmp_path, "a.yaml", "base: base.yaml\noptimizer: {schedule: constant}"))
    assert config.optimizer.decay_steps == 0
    assert config.optimizer.min_lr == 1e-4


def test_a_base_may_prepare_values_for_its_children(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "optimizer: {decay_steps: 5}")
    child = write(tmp_path, "a.yaml", "base: base.yaml\noptimizer: {schedule: wsd}")
    assert load_config(child).optimizer.decay_steps == 5
    assert load_config(write(tmp_path, "b.yaml", "base: base.yaml")).optimizer.decay_steps == 0


def test_a_child_that_sets_one_itself_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "optimizer: {schedule: wsd, decay_steps: 5}")
    path = write(tmp_path, "a.yaml", "base: base.yaml\noptimizer:\n  schedule: constant\n  decay_steps: 7")
    assert refusal(path).startswith(f"{path}:4: optimizer.decay_steps has no effect")


def test_conditions_on_another_section(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "optimizer:\n  value_lr_multiplier: 4\n")
    assert (
        refusal(path) == f"{path}:2: optimizer.value_lr_multiplier has no effect unless model.memory is set: {SUFFIX}"
    )
    write(
        tmp_path, "memory.yaml", "model: {memory: {}}\noptimizer: {value_lr_multiplier: 4, pre_value_lr_multiplier: 2}"
    )
    dense = load_config(write(tmp_path, "b.yaml", "base: memory.yaml\nmodel: {memory: null}"))
    assert dense.optimizer.value_lr_multiplier == 1.0
    no_pre_values = load_config(write(tmp_path, "c.yaml", "base: memory.yaml\nmodel: {memory: {pre_value_dim: 0}}"))
    assert no_pre_values.optimizer.value_lr_multiplier == 4.0
    assert no_pre_values.optimizer.pre_value_lr_multiplier is None
    narrow = load_config(write(tmp_path, "e.yaml", "base: memory.yaml\nmodel: {memory: {pre_value_dim: 1}}"))
    assert narrow.optimizer.pre_value_lr_multiplier == 2.0
    own_rate = load_config(write(tmp_path, "d.yaml", "base: memory.yaml\noptimizer: {value_lr: 1e-3}"))
    assert (own_rate.optimizer.value_lr, own_rate.optimizer.value_lr_multiplier) == (1e-3, 1.0)


@pytest.mark.parametrize(
    ("recompute", "model", "reason"),
    [
        ("none", "{}", "model.residual_streams is set"),
        ("full", "{residual_streams: {}}", "train.recompute is none or selective"),
    ],
)
def test_streams_are_mixed_again_where_sites_keep_some(tmp_path: Path, recompute: str, model: str, reason: str) -> None:
    path = write(tmp_path, "a.yaml", f"model: {model}\ntrain: {{recompute: {recompute}, recompute_streams: 2}}")
    assert f"train.recompute_streams has no effect unless {reason}: {SUFFIX}" in refusal(path)
    config = load_config(path, ["model.residual_streams={count: 2}", "train.recompute=selective"])
    assert config.train.recompute_streams == 2


@pytest.mark.parametrize(
    ("memory", "key", "reason"),
    [
        ("kind: pkm, value_dim: 128, tucker_rank: 2", "tucker_rank", "kind is ultramem_v2 or ultramem"),
        ("kind: memory_plus, pre_value_dim: 0", "pre_value_dim", "kind is ultramem_v2"),
        ("kind: memory_plus, value_projection: true", "value_projection", "kind is pkm"),
        ("kind: peer, value_dim: 128, output_gate: true", "output_gate", "kind is pkm or memory_plus"),
        ("kind: peer, value_dim: 128, initialisation: released", "initialisation", "kind is ultramem_v2 or ultramem"),
        ("kind: ultramem, query: single", "query", "kind is ultramem_v2"),
        ("kind: ultramem, value_blocks: projected", "value_blocks", "kind is ultramem_v2"),
        ("value_blocks: summed", "value_blocks", "key_expansion is above 1"),
        ("biases: true", "biases", "kind is pkm, memory_plus or peer"),
        ("sharing: {pattern: all, group: 2}", "sharing.group", "sharing.pattern is block, ring or no_ring"),
        # At the edge: one singular value is the leading one, and no pre-values have no products.
        (
            "tucker_rank: 1, tucker_penalty_weight: 1.0",
            "tucker_penalty_weight",
            "tucker_rank is above 1",
        ),
        (
            "pre_value_dim: 0, pre_value_activation: gelu",
            "pre_value_activation",
            "pre_value_dim is above 0",
        ),
        ("tucker_penalty_margin: 0.5", "tucker_penalty_margin", "tucker_penalty_weight is above 0"),
        (
            "sharing: {pattern: block, group: 2, window: released}",
            "sharing.window",
            "sharing.pattern is ring or no_ring",
        ),
        ("placement: {blocks: [1], every: 2}", "placement.every", "placement.blocks and placement.spans are null"),
        ("placement: {spans: '0:1', blocks: [1]}", "placement.blocks", "placement.spans is null"),
        ("placement: {spans: '0:1', position: instead}", "placement.position", "placement.spans is null"),
    ],
)
def test_a_kind_of_memory_has_its_own_options(tmp_path: Path, memory: str, key: str, reason: str) -> None:
    path = write(tmp_path, "a.yaml", f"model: {{memory: {{{memory}}}}}")
    assert f"model.memory.{key} has no effect unless {reason}: {SUFFIX}" in refusal(path)


def test_a_base_of_one_kind_serves_another(tmp_path: Path) -> None:
    """Options of the first kind fall back to their defaults; pre-values of PEER have a learning rate too."""
    write(tmp_path, "base.yaml", "model: {memory: {num_cores: 1, query: single, pre_value_dim: 8}}")
    text = "base: base.yaml\nmodel: {memory: {kind: peer, value_dim: 128}}\noptimizer: {pre_value_lr_multiplier: 2}"
    config = load_config(write(tmp_path, "a.yaml", text))
    assert config.model.memory == PeerConfig(value_dim=128)
    assert config.optimizer.pre_value_lr_multiplier == 2


@dataclass(frozen=True)
class BehindTheHeads(PkmConfig):
    """A memory that can stand in one place only."""

    slot: ClassVar[Slot | None] = HEADS

    kind: Literal["behind_the_heads"] = "behind_the_heads"  # type: ignore[assignment]


@pytest.mark.parametrize("setting", ["position: instead", "spans: '0:1'"])
def test_a_memory_with_a_place_of_its_own_is_not_placed_around_the_feed_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setitem(FAMILIES, "behind_the_heads", replace(PKM, config=BehindTheHeads))  # type: ignore[arg-type]
    memory = "kind: behind_the_heads, value_dim: 128, placement"
    path = write(tmp_path, "a.yaml", f"model: {{memory: {{{memory}: {{{setting}}}}}}}")
    key = f"model.memory.placement.{setting.split(':')[0]}"
    reason = "model.memory stands where placement says, and not in the one place of its kind"
    assert f"{key} has no effect unless {reason}: {SUFFIX}" in refusal(path)
    write(tmp_path, "a.yaml", f"model: {{memory: {{{memory}: {{blocks: [1]}}}}}}")
    config = load_config(path)
    assert config.model.memory is not None
    assert config.model.memory_name(0) == "decoder.layers.1.self_attention.core_attention.memory"


@pytest.mark.parametrize(
    "memory", ["kind: midus", "kind: stem", "kind: pkm, value_dim: 128, placement: {position: instead}"]
)
def test_a_feed_forward_that_no_block_has_has_no_width(tmp_path: Path, memory: str) -> None:
    path = write(tmp_path, "a.yaml", f"model: {{ffn_hidden_size: 96, memory: {{{memory}}}}}")
    reason = "model.moe is null and model.memory.placement leaves a block with a feed-forward"
    assert f"model.ffn_hidden_size has no effect unless {reason}: {SUFFIX}" in refusal(path)
    assert load_config(path, ["model.memory.placement.every=2"]).model.ffn_hidden_size == 96


@pytest.mark.parametrize(
    ("memory", "what"),
    [
        ("kind: midus", "model.memory.kind is midus"),
        ("kind: pkm, value_dim: 128, placement: {position: inserted}", "model.memory.placement.position is inserted"),
    ],
)
def test_blocks_are_inserted_beside_others(tmp_path: Path, memory: str, what: str) -> None:
    path = write(tmp_path, "a.yaml", f"model: {{memory: {{{memory}}}}}")
    with pytest.raises(ConfigError) as caught:
        validate(load_config(path), 1)
    assert f"{what}, and its placement makes inserted blocks" in str(caught.value)
    assert "Name them, as model.memory.placement.blocks: [1, 3], or let `megamem upscale` insert them" in str(
        caught.value
    )
    validate(load_config(path, ["model.memory.placement.blocks=[1, 3]"]), 1)


def test_every_cross_section_rule_names_a_key() -> None:
    assert {rule.key for rule in RUN_RULES} <= set(all_keys(RunConfig))
    silent = {item.key for item in ineffective_fields(RunConfig())}
    of_others = {rule.key for rule in RUN_RULES if not rule.key.startswith(("model.memory.", "model.second_memory."))}
    assert of_others <= silent, "a dense model reads none of them"


def test_all_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "optimizer: {decay_steps: 5}\nparallel: {virtual_pipeline: 2}")
    message = refusal(path)
    assert message.startswith("2 problems in the configuration:\n  - ")
    assert "optimizer.decay_steps" in message
    assert "parallel.virtual_pipeline" in message


@dataclass(frozen=True)
class Inner(Config):
    mode: str = "off"
    level: Annotated[int, EffectiveWhen(lambda c: c.mode == "on", "mode is on")] = 0
    detail: Annotated[int, EffectiveWhen(lambda c: c.level > 0, "level is above 0")] = 0


@dataclass(frozen=True)
class Outer(Config):
    switch: bool = False
    inner: Annotated[Inner, EffectiveWhen(lambda c: c.switch, "switch is true")] = field(default_factory=Inner)
    items: tuple[Inner, ...] = ()


def test_a_dropped_value_may_silence_another(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "switch: true\ninner: {mode: 'on', level: 2, detail: 3}")
    config = load_as(Outer, write(tmp_path, "a.yaml", "base: base.yaml\ninner: {mode: 'off'}"))
    assert config.inner == Inner()


def test_a_silent_section_and_list_elements(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^here: inner has no effect unless switch is true"):
        parse_config({"inner": {"mode": "on"}}, Outer, "here")
    with pytest.raises(ConfigError, match=r"^here: items.1.level has no effect unless mode is on"):
        parse_config({"items": [{"mode": "on", "level": 1}, {"level": 1}]}, Outer, "here")
    write(tmp_path, "base.yaml", "inner: {mode: x}\nitems: [{level: 1}]")
    assert load_as(Outer, write(tmp_path, "a.yaml", "base: base.yaml")) == Outer(items=(Inner(),))


@pytest.mark.parametrize("position", ["beside", "instead"])
@pytest.mark.parametrize("every", [1, 3])
def test_blocks_with_a_feed_forward_are_counted(position: Literal["beside", "instead"], every: int) -> None:
    def model(num_layers: int) -> ModelConfig:
        memory = PkmConfig(
            num_keys=8, key_dim=8, value_dim=128, top_k=2, placement=PlacementConfig(every=every, position=position)
        )
        return ModelConfig(num_layers=num_layers, memory=memory)

    listed = model(7)
    assert listed.memory is not None
    acting = [listed.memory.slot_of(span) for span in listed.memory_spans]
    assert listed.num_ffn_blocks == 7 - sum(not slot.has_ffn for slot in acting)
    deep = 10_000
    assert model(deep).num_ffn_blocks == deep - (deep // every if position == "instead" else 0)
