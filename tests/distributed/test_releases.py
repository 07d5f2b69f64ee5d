"""Models of every family under the public codes' names and back, bit for bit.

The oracle of the names is `megamem.releases.names`, which is held to tensors that the releases recorded; the models'
own state says what must be there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import joined
from torch import Tensor

from megamem.banks.shuffle import KeyedShuffle
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from megamem.releases.names import from_meta, from_released
from megamem.releases.release import META_RELEASE, ULTRAMEMV2_RELEASE
from pretrain.checkpoint.store.paired import PairedReader
from pretrain.checkpoint.store.state_dict import StateDictFile, StateDictReader
from pretrain.checkpoint.store.tensors import Region
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.convert.released.pairs import as_ours, as_released, released_pairs
from pretrain.engine.build import build_chunks
from pretrain.errors import CheckpointError, ConfigError
from tests.in_memory import InMemory

SEED = 5
V2 = UltraMemV2Config(num_keys=6, key_dim=8, value_dim=16, pre_value_dim=12, top_k=4)
GRID: Any = {"num_keys": 6, "key_dim": 8, "top_k": 4, "num_heads": 2}
EVERY_OTHER = PlacementConfig(every=2)
MEMORIES: dict[str, tuple[MemoryConfig | None, str]] = {
    "dense": (None, ULTRAMEMV2_RELEASE),
    "v2, stored shuffle": (replace(V2, shuffle="table"), ULTRAMEMV2_RELEASE),
    "v2, keyed shuffle, blocks of layers": (replace(V2, sharing=SharingConfig("block", 2)), ULTRAMEMV2_RELEASE),
    "v2, two heads, ring, no shuffle": (
        replace(V2, num_heads=2, pre_value_dim=0, shuffle="none", sharing=SharingConfig("ring", 2, "released")),
        ULTRAMEMV2_RELEASE,
    ),
    "v2, every other block": (replace(V2, key_expansion=2, placement=EVERY_OTHER), ULTRAMEMV2_RELEASE),
    "ultramem": (UltraMemConfig(num_keys=6, key_dim=8, value_dim=16, top_k=4), ULTRAMEMV2_RELEASE),
    "memory_plus": (MemoryPlusConfig(value_dim=16, sharing=SharingConfig("all"), **GRID), ULTRAMEMV2_RELEASE),
    "meta: memory_plus": (
        MemoryPlusConfig(value_dim=16, sharing=SharingConfig("all"), query_norm=False, biases=True, **GRID),
        META_RELEASE,
    ),
    "meta: pkm": (
        PkmConfig(value_dim=16, value_projection=True, output_gate=True, biases=True, query_norm=False, **GRID),
        META_RELEASE,
    ),
    "meta: peer": (PeerConfig(value_dim=32, query_norm=False, biases=True, **GRID), META_RELEASE),
}


def model_of(memory: MemoryConfig | None) -> ModelConfig:
    return ModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=20,
        tied_embeddings=memory is None,
        vocab_size_multiple=16,
        memory=memory,
    )


def state_of(model: ModelConfig) -> dict[str, Tensor]:
    """A built model's weights and buffers, with random elements."""
    config = RunConfig(model=model, train=TrainConfig(sequence_length=16), seed=SEED)
    with joined(config) as groups:
        (chunk,) = build_chunks(config, groups, vocab_size=30)
        state = {name: each for name, each in chunk.state_dict().items() if isinstance(each, Tensor)}
        return {
            name: torch.randn(each.shape).to(each.dtype) if each.is_floating_point() else each.clone()
            for name, each in state.items()
        }


def read_all(reader: PairedReader) -> dict[str, Tensor]:
    return {name: reader.read(info.whole(name)) for name, info in reader.tensors.items()}


@pytest.fixture(scope="module")
def states(run_ranks: Any) -> dict[str, dict[str, Tensor]]:
    """States by case."""
    (found,) = run_ranks(
        lambda: {
            # Arrays: tensors would be in shared memory of a rank that has ended.
            case: {name: each.numpy() for name, each in state_of(model_of(memory)).items()}
            for case, (memory, _) in MEMORIES.items()
        },
        1,
    )
    return {case: {name: torch.from_numpy(each) for name, each in state.items()} for case, state in found.items()}


@pytest.mark.parametrize("case", MEMORIES)
def test_there_and_back(case: str, states: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    memory, release = MEMORIES[case]
    model, state = model_of(memory), states[case]
    source = as_released(InMemory(state), model, release, seed=SEED)
    StateDictFile("released.pt", source.tensors).write(tmp_path / "released.pt", source.read, 1 << 16)
    released = torch.load(tmp_path / "released.pt", weights_only=True)

    translated = (from_meta if release == META_RELEASE else from_released)(released, model)
    permutations = {name: each for name, each in translated.items() if name.endswith(".permutation")}
    back = read_all(as_ours(StateDictReader(tmp_path / "released.pt"), model, release))
    expected = state
    if release == META_RELEASE:
        expected = {name: each for name, each in state.items() if ".memory." in name or name.startswith("banks.")}
    assert set(back) == set(translated) == set(expected) | set(permutations)
    for name, tensor in expected.items():
        for result in (translated[name], back[name]):
            assert result.dtype == tensor.dtype
            assert result.equal(tensor), name
    for name, permutation in permutations.items():
        assert permutation.equal(back[name])
        assert permutation.sort().values.equal(torch.arange(len(permutation)))
    if case == "v2, keyed shuffle, blocks of layers":
        assert len(permutations) == 4
        assert not permutations[min(permutations)].equal(permutations[max(permutations)])


def test_a_stored_permutation_moves_entries_as_the_keyed_shuffle_does(states: dict[str, dict[str, Tensor]]) -> None:
    case = "v2, every other block"
    model = model_of(MEMORIES[case][0])
    released = as_released(InMemory(states[case]), model, ULTRAMEMV2_RELEASE, seed=SEED)

    def entry(layer: int, start: int, size: int) -> list[int]:
        return released.read(Region(f"transformer.mem_blocks.{layer}.shuffle_index", (start,), (size,))).tolist()

    for layer, block in ((0, model.memory_spans[0].read), (1, model.memory_spans[1].read)):
        shuffle = KeyedShuffle(12, seed=SEED, name=f"decoder.layers.{block}.mlp.memory")
        assert entry(layer, 17, 5) == shuffle(torch.arange(17, 22)).tolist()


def test_what_a_release_does_not_have_is_refused(states: dict[str, dict[str, Tensor]]) -> None:
    for memory, release in ((MEMORIES["meta: pkm"][0], ULTRAMEMV2_RELEASE), (V2, META_RELEASE), (None, META_RELEASE)):
        with pytest.raises(ConfigError, match="has no models with memory of kind"):
            released_pairs(model_of(memory), {}, release)
    mixture = replace(model_of(None), moe=MoEConfig(num_experts=4, top_k=2))
    with pytest.raises(ConfigError, match=r"has no models with model\.moe"):
        released_pairs(mixture, {}, ULTRAMEMV2_RELEASE)
    assert isinstance(V2, UltraMemV2Config)
    queried = replace(V2, placement=PlacementConfig(query_group=2))
    with pytest.raises(ConfigError, match=r"has no memories that read with an earlier block's stream"):
        released_pairs(model_of(queried), {}, ULTRAMEMV2_RELEASE)
    biased = MemoryPlusConfig(value_dim=16, biases=True, **GRID)
    with pytest.raises(ConfigError, match=r"has no decoder\.layers\.0\.mlp\.memory\.query_bias"):
        released_pairs(model_of(biased), {"decoder.layers.0.mlp.memory.query_bias": (3,)}, ULTRAMEMV2_RELEASE)
    with pytest.raises(CheckpointError, match=r"transformer\.blocks\.0\.other"):
        as_ours(InMemory({"transformer.blocks.0.other": torch.zeros(1)}), model_of(None), ULTRAMEMV2_RELEASE)
    model, state = model_of(V2), dict(states["v2, stored shuffle"])
    del state["decoder.layers.1.mlp.memory.keys"]
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.1\.mlp\.memory\.keys is missing"):
        as_released(InMemory(state), model, ULTRAMEMV2_RELEASE, seed=SEED)


@pytest.mark.parametrize("case", ["dense", "v2, every other block", "meta: memory_plus"])
def test_a_missing_tensor_is_named(case: str, states: dict[str, dict[str, Tensor]]) -> None:
    memory, release = MEMORIES[case]
    model = model_of(memory)
    whole = read_all(as_released(InMemory(states[case]), model, release, seed=SEED))
    for name in whole:
        # Any of the copies of a shared table will do.
        if release == META_RELEASE and name.endswith(".values.weight"):
            continue
        part = {each: tensor for each, tensor in whole.items() if each != name}
        with pytest.raises(CheckpointError, match="is not complete"):
            as_ours(InMemory(part), model, release)
