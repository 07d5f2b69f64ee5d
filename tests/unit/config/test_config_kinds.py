"""`model.memory` is of one kind, and has the keys of that kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from megamem.families.family import Family
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.pkm.family import PKM
from megamem.families.registry import FAMILIES
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.keys import all_keys
from pretrain.config.loader import from_dict, to_dict
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError
from tests.plain_config import parse_config
from tools.config.describe import describe_fields

# All keys that one configuration of all kinds had, at their defaults.
FLAT: dict[str, Any] = {
    "num_keys": 64,
    "key_dim": 32,
    "value_dim": 64,
    "pre_value_dim": 64,
    "top_k": 16,
    "row_top_k_limit": 128,
    "num_heads": 1,
    "tucker_rank": 2,
    "num_cores": 2,
    "query": "per_rank",
    "key_expansion": None,
    "value_blocks": "summed",
    "pre_value_activation": "none",
    "shuffle": "keyed",
    "query_norm": True,
    "biases": False,
    "value_projection": False,
    "output_gate": False,
    "initialisation": "paper",
    "tucker_penalty_weight": 0.0,
    "tucker_penalty_margin": 0.15,
    "key_balance_weight": 0.0,
    "sharing": {"pattern": "none", "group": 1, "window": "paper"},
    "placement": {"every": 1, "blocks": None, "spans": None, "position": "beside", "norm": "rms"},
}


# Kinds that came after configurations were stored so may have other defaults of the same keys.
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in ("midus", "mome")])
def test_a_stored_configuration_with_the_keys_of_all_kinds_is_read(kind: str) -> None:
    stored = {"model": {"hidden_size": 64, "memory": {"kind": kind, **FLAT}}}
    assert from_dict(stored).model.memory == FAMILIES[kind].config(value_dim=FLAT["value_dim"])


def test_a_stored_configuration_of_no_kind_is_that_of_the_first() -> None:
    assert from_dict({"model": {"memory": FLAT}}).model.memory == UltraMemV2Config()


def test_a_stored_key_that_no_kind_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key model\.memory\.colour"):
        from_dict({"model": {"memory": {**FLAT, "colour": "red"}}})


def test_a_kind_that_there_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model:\n  memory: {kind: memory+}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}:2: model.memory.kind is 'memory+' (text), expected one of ultramem_v2, ultramem, pkm, memory_plus, peer, "
        "linear_memory, move, lave, value_ngrams, mome, tide, stem, midus, engram, residual_ngrams, ngram_embedding: did you mean memory_plus?"
    )


def test_an_override_of_the_kind_keeps_what_both_kinds_have(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: {hidden_size: 48, memory: {num_keys: 20, top_k: 5, value_dim: 48, num_cores: 1}}")
    config = load_config(path, ["model.memory.kind=pkm"])
    assert config.model.memory == PkmConfig(num_keys=20, top_k=5, value_dim=48)
    with pytest.raises(
        ConfigError, match=r"^override model\.memory\.num_cores=4: model\.memory\.num_cores has no effect"
    ):
        load_config(path, ["model.memory.kind=pkm", "model.memory.num_cores=4"])


def test_a_misspelt_key_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key model\.memory\.tucker_rnk: did you mean model\.memory\.tucker_rank\?"
    ):
        parse_config({"model": {"memory": {"kind": "memory_plus", "tucker_rnk": 3}}}, RunConfig)


def test_only_its_own_keys_are_stored() -> None:
    config = replace(RunConfig(), model=replace(RunConfig().model, memory=MemoryPlusConfig()))
    assert set(to_dict(config)["model"]["memory"]) <= {
        item.name for item in MemoryPlusConfig.__dataclass_fields__.values()
    }


def test_the_help_names_the_kinds_of_a_key() -> None:
    docs = {doc.key: doc for doc in describe_fields(RunConfig)}
    kinds = (
        "ultramem_v2 | ultramem | pkm | memory_plus | peer | linear_memory | move | lave | value_ngrams | mome | tide | stem | midus | "
        "engram | residual_ngrams | ngram_embedding"
    )
    assert docs["model.memory.kind"].type == kinds
    assert docs["model.memory.kind"].default == "ultramem_v2"
    assert docs["model.memory.value_dim"].effective_when is None
    assert (
        docs["model.memory.num_keys"].effective_when == "kind is ultramem_v2, ultramem, pkm, memory_plus, peer or midus"
    )
    assert docs["model.memory.tucker_rank"].effective_when == "kind is ultramem_v2 or ultramem"
    assert docs["model.memory.value_blocks"].effective_when == "kind is ultramem_v2 and key_expansion is above 1"
    assert docs["model.memory.biases"].effective_when == "kind is pkm, memory_plus or peer"


@dataclass(frozen=True)
class OwnConfig(PkmConfig):
    kind: Literal["own"] = "own"  # type: ignore[assignment]
    """own: of this test."""
    depth: int = 3
    """Its depth."""


def test_a_family_that_is_registered_is_read_as_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    family: Family[OwnConfig] = replace(PKM, config=OwnConfig)  # type: ignore[arg-type]
    monkeypatch.setitem(FAMILIES, family.kind, family)
    path = tmp_path / "a.yaml"
    path.write_text("model: {memory: {kind: own, value_dim: 128, depth: 5}}")
    assert load_config(path).model.memory == OwnConfig(value_dim=128, depth=5)
    assert "model.memory.depth" in set(all_keys(RunConfig))
    with pytest.raises(ConfigError, match=r"model\.memory\.depth has no effect unless kind is own"):
        load_config(path, ["model.memory.kind=pkm", "model.memory.depth=2"])
