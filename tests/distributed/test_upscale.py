"""Grown models: what their tensors are, that they begin as the model that they are made of, and that they go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.checkpoint.folder import read_state
from pretrain.checkpoint.run_entries import restore_run
from pretrain.checkpoint.store.tensors import TensorReader, pieces
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.convert.convert import convert
from pretrain.convert.format import ConversionTarget, OpenedCheckpoint
from pretrain.convert.registry import FORMATS, open_checkpoint
from pretrain.convert.resources import RESERVE_BYTES, Resources
from pretrain.data.tokenizer import train_bpe
from pretrain.errors import CheckpointError, ConfigError
from pretrain.growth.plan import grown_blocks
from pretrain.growth.upscale import Grown, upscale
from tests.distributed.tiny_runs import SHARED, VOCAB_SIZE, chunk_of, joined, on, tiny_run
from tests.in_memory import InMemory
from tests.rotation import in_rotation
from tests.whole_tensors import whole_tensors

DENSE = replace(SHARED, model=replace(SHARED.model, memory=None, num_layers=4))
KEYS = [
    "model.memory.kind=midus",
    "model.memory.num_heads=4",
    "model.memory.num_keys=8",
    "model.memory.value_dim=16",
]
HEADS = [f"model.memory.{key}" for key in ("num_heads=2", "key_dim=8", "top_k=4")]
OTHERS = {
    "pkm": ["kind=pkm", "num_keys=8", "value_dim=32", "query_norm=false", "biases=true", "output_gate=true"],
    "linear": ["kind=linear_memory", "num_rows=50", "value_dim=32"],
    "ultramem": ["kind=ultramem", "num_keys=8", "value_dim=8", "queries_per_head=true", "shuffle=table"],
}
"""Memories that elsewhere stand around the feed-forward."""
MEMORIES = {
    "memory": KEYS,
    "memory, layer norms": [*KEYS, "model.memory.placement.norm=layer", "model.memory.query_norm=layer"],
    "memory, projected": [*KEYS, "model.memory.query_from=projected"],
    "memory, stream and heads": [*KEYS, "model.memory.query_from=stream_and_heads", "model.memory.query_norm=layer"],
} | {name: [*HEADS, *(f"model.memory.{key}" for key in keys)] for name, keys in OTHERS.items()}
METHODS = ("llama-pro", *MEMORIES)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2 x memory 2": {"tensor": 2, "memory": 2},
    "pipeline 2": {"pipeline": 2},
    "context 2": {"context": 2},
}
# Norms and queries are heads', which no stage and no cut of a sequence parts.
BEGINNINGS = in_rotation(
    [
        (layout, method)
        for layout in ("one rank", *LAYOUTS)
        for method in METHODS
        if layout not in ("pipeline 2", "context 2") or "," not in method
    ]
)
RESOURCES = Resources(num_workers=1, max_memory_bytes=2 * RESERVE_BYTES)


def grow(base: OpenedCheckpoint, name: str, num_inserted: int = 2) -> Grown:
    """Grow a model by a method, or by the memories of a name."""
    keys = MEMORIES.get(name, [])
    method: Any = "memory" if keys else name
    blocks = grown_blocks(method, num_layers=base.config.model.num_layers, num_inserted=num_inserted)
    return upscale(base, blocks, keys, name="grown")


def written(grown: Grown, folder: Path) -> OpenedCheckpoint:
    target = ConversionTarget(ParallelConfig(), with_optimizer=False, dtype=None, max_file_bytes=2**20)
    convert(
        grown.checkpoint,
        FORMATS["megatron-dist"],
        folder,
        target,
        RESOURCES,
        on_start=lambda name, size: lambda n: None,
    )
    return open_checkpoint(folder)


def whole(reader: TensorReader) -> dict[str, Tensor]:
    return {name: reader.read(info.whole(name)) for name, info in reader.tensors.items()}


@pytest.fixture(scope="module")
def base(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a dense model that has learnt something."""
    folder = tmp_path_factory.mktemp("base")

    def main() -> None:
        with tiny_run(DENSE) as run:
            run.train(3)
            run.save(folder)

    run_ranks(main, 1)
    return folder / "step_00000003"


@pytest.fixture(scope="module")
def grown(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedCheckpoint]:
    folder = tmp_path_factory.mktemp("grown")
    return {name: written(grow(open_checkpoint(base), name), folder / name) for name in METHODS}


def test_blocks_of_memory_have_the_next_ones_attention_and_no_values(
    base: Path, grown: Mapping[str, OpenedCheckpoint]
) -> None:
    before, after = whole(open_checkpoint(base).reader), whole(grown["memory"].reader)
    assert grown["memory"].config.model.memory_spans == tuple(
        replace(span, read=block, add=block)
        for span, block in zip(grown["memory"].config.model.memory_spans, (1, 4), strict=True)
    )
    names = {0: 0, 2: 1, 3: 2, 5: 3}
    expected = {f"decoder.layers.{new}.": f"decoder.layers.{old}." for new, old in names.items()}
    for name, tensor in before.items():
        if name.startswith("optimizer."):
            continue
        at = next((new for new, old in expected.items() if name.startswith(old)), None)
        assert torch.equal(after.pop(name if at is None else name.replace(expected[at], at)), tensor), name
    for new, following in ((1, 1), (4, 3)):
        for part in (
            "input_layernorm.weight",
            "self_attention.linear_qkv.weight",
            "self_attention.q_layernorm.weight",
            "self_attention.k_layernorm.weight",
        ):
            assert torch.equal(after.pop(f"decoder.layers.{new}.{part}"), before[f"decoder.layers.{following}.{part}"])
    for bank in (0, 1):
        table = after.pop(f"banks.{bank}.values")
        assert table.shape == (64, 16)
        assert not table.any()
    memory = "self_attention.core_attention.memory"
    assert set(after) == {f"decoder.layers.{new}.{memory}.{name}" for new in (1, 4) for name in ("keys", "expansion")}
    for name in ("keys", "expansion"):
        first, second = (after[f"decoder.layers.{new}.{memory}.{name}"] for new in (1, 4))
        assert first.any()
        assert not torch.equal(first, second)
        # Heads have keys and expansions of their own.
        assert not torch.equal(first[0], first[1])


def test_other_memories_stand_behind_the_next_ones_whole_attention(
    base: Path, grown: Mapping[str, OpenedCheckpoint]
) -> None:
    """The block has its output projection; it has no second norm and no feed-forward."""
    before = whole(open_checkpoint(base).reader)
    for name in OTHERS:
        after = whole(grown[name].reader)
        for new, following in ((1, 1), (4, 3)):
            here = f"decoder.layers.{new}."
            parts = {part.removeprefix(here) for part in after if part.startswith(here)}
            for part in (
                "input_layernorm.weight",
                "self_attention.linear_qkv.weight",
                "self_attention.linear_proj.weight",
                "self_attention.q_layernorm.weight",
                "self_attention.k_layernorm.weight",
            ):
                assert torch.equal(after[here + part], before[f"decoder.layers.{following}.{part}"])
                parts.remove(part)
            assert all(part.startswith("mlp.memory.") for part in parts)
            assert parts
        assert not after["banks.0.values"].any()


def test_new_weights_are_those_of_a_run_with_this_seed(run_ranks: Any, grown: Mapping[str, OpenedCheckpoint]) -> None:
    def main() -> dict[str, dict[str, Tensor]]:
        found = {}
        for name in MEMORIES:
            with tiny_run(grown[name].config) as run:
                found[name] = dict(whole(whole_tensors(run.bare[0])))
        return found

    for name, fresh in run_ranks(main, 1)[0].items():
        written_tensors = whole(grown[name].reader)
        assert set(fresh) == set(written_tensors)
        for weight in fresh:
            if ".memory." in weight or weight.startswith("banks."):
                assert torch.equal(fresh[weight], written_tensors[weight]), (name, weight)


def begun(config: RunConfig, path: Path) -> tuple[list[Tensor], tuple[float, float]]:
    """Logits of a few tokens on a rank, without pipelines, and the next step's loss and norm."""
    with tiny_run(config) as run:
        # Weights alone are restored: both read the data from the beginning.
        restore_run(read_state(path), run.chunks, run.optimizer)
        logits = []
        if config.parallel.pipeline == 1:
            ids = torch.randint(0, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(3))
            ids = ids.chunk(config.parallel.context, 1)[0]
            with torch.no_grad():
                positions = torch.arange(ids.shape[1]).expand(2, -1)
                logits = [run.bare[0](ids, positions)]
        return logits, run.train(1)[0]


@pytest.fixture(scope="module")
def beginnings(run_ranks: Any, base: Path, grown: Mapping[str, OpenedCheckpoint]) -> list[list[dict[str, Any]]]:
    """Beginnings of the base and of each grown model, by rank of one and of two, and by layout."""

    def main(layouts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"base": begun(on(DENSE, **sizes), base)}
            | {
                method: begun(on(grown[method].config, **sizes), grown[method].path)
                for layout, method in BEGINNINGS
                if layout == name
            }
            for name, sizes in layouts.items()
        ]

    return [*run_ranks(lambda: main({"one rank": {}}), 1), *run_ranks(lambda: main(LAYOUTS), 2)]


@pytest.mark.parametrize("method", list(dict.fromkeys(method for _, method in BEGINNINGS)))
def test_a_grown_model_begins_as_its_base_to_the_bit_on_every_layout(
    beginnings: list[list[dict[str, Any]]], method: str
) -> None:
    """Logits, and the loss of a step over the same data; its gradient has more parts."""
    for of_layout in (of_layout for of_rank in beginnings for of_layout in of_rank):
        if method not in of_layout:
            continue
        (old_logits, (old_loss, old_norm)), (new_logits, (new_loss, new_norm)) = of_layout["base"], of_layout[method]
        assert all(torch.equal(a, b) for a, b in zip(old_logits, new_logits, strict=True))
        assert old_loss == new_loss
        assert new_norm > old_norm


def origins(grown: Grown) -> dict[str, Tensor]:
    return whole(grown.checkpoint.reader)


def test_copies_that_add_nothing_have_zeros_where_they_join_the_stream(base: Path) -> None:
    opened = open_checkpoint(base)
    found, before = origins(grow(opened, "llama-pro")), whole(opened.reader)
    for new, old in ((2, 1), (5, 3)):
        for part in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
            assert not found[f"decoder.layers.{new}.{part}"].any()
        for part in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "pre_mlp_layernorm.weight"):
            assert torch.equal(found[f"decoder.layers.{new}.{part}"], before[f"decoder.layers.{old}.{part}"])


def test_averaged_blocks_stand_between_the_two_that_they_are_the_mean_of(base: Path) -> None:
    opened = open_checkpoint(base)
    found, before = origins(grow(opened, "averaged")), whole(opened.reader)
    for new, old in ((1, 0), (4, 2)):
        for part in ("self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "input_layernorm.weight"):
            first, second = (before[f"decoder.layers.{number}.{part}"] for number in (old, old + 1))
            assert torch.equal(found[f"decoder.layers.{new}.{part}"], (first + second) / 2)


def test_solar_joins_the_first_and_the_last_blocks(base: Path) -> None:
    opened = open_checkpoint(base)
    grown = grow(opened, "solar")
    found, before = origins(grown), whole(opened.reader)
    assert grown.inserted == (3, 4)
    for new, old in enumerate((0, 1, 2, 1, 2, 3)):
        for part in ("self_attention.linear_qkv.weight", "mlp.linear_fc2.weight"):
            assert torch.equal(found[f"decoder.layers.{new}.{part}"], before[f"decoder.layers.{old}.{part}"])


def test_regions_are_read_as_the_whole_is(base: Path) -> None:
    """Whoever converts reads pieces, and no more."""
    for method in ("memory", "averaged"):
        reader = grow(open_checkpoint(base), method).checkpoint.reader
        for name, info in reader.tensors.items():
            read = [reader.read(region).flatten() for region in pieces(info.whole(name), 37)]
            assert torch.equal(torch.cat(read), reader.read(info.whole(name)).flatten()), name


def test_what_cannot_be_grown_is_refused(base: Path, grown: Mapping[str, OpenedCheckpoint]) -> None:
    opened = open_checkpoint(base)
    blocks = grown_blocks("memory", num_layers=4, num_inserted=1)
    with pytest.raises(ConfigError, match=r"has a memory of kind midus: blocks are inserted into models without one"):
        upscale(grown["memory"], blocks, KEYS, name="grown")
    with pytest.raises(ConfigError, match=r"model\.memory\.kind is not given"):
        upscale(opened, blocks, KEYS[1:], name="grown")
    with pytest.raises(ConfigError, match=r"train\.num_steps=4: a grown model takes"):
        upscale(opened, blocks, [*KEYS, "train.num_steps=4"], name="grown")
    for kind, *keys in (
        ("lave", "value_dim=16", "vocab_size=61", "num_gate_heads=2"),
        ("stem", "value_dim=16", "vocab_size=61"),
        ("mome", "value_dim=8", "num_heads=2", "gate_channels=8", "vocab_size=61"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.memory\.kind is {kind}, which has no inserted blocks"):
            upscale(opened, blocks, [f"model.memory.{key}" for key in (f"kind={kind}", *keys)], name="grown")
    for kind in (["kind=peer", "value_dim=32"], ["kind=tide", "value_dim=32", "vocab_size=61"]):
        with pytest.raises(ConfigError, match=r"position is inserted, where tables begin as zeros, but kind"):
            upscale(opened, blocks, [f"model.memory.{key}" for key in kind], name="grown")
    with pytest.raises(ConfigError, match=r"model\.memory\.num_heads is 2, but hidden_size = 32 is made of 4 heads"):
        upscale(opened, blocks, [*KEYS, "model.memory.num_heads=2"], name="grown")
    lacking = replace(
        opened, reader=InMemory({"decoder.final_layernorm.weight": torch.ones(32)}), config=DENSE, saved=None
    )
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\."):
        upscale(lacking, blocks, KEYS, name="grown")


HUGGINGFACE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", HUGGINGFACE)
def test_models_of_others_are_grown_as_they_come(run_ranks: Any, tmp_path: Path, name: str) -> None:
    """Llama and Qwen3 in bf16: the same logits to the bit, before and after, on one rank and on two."""
    transformers = pytest.importorskip("transformers", reason="models to grow are made with it: pip install '.[hf]'")
    kind, options = HUGGINGFACE[name]
    torch.manual_seed(1)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": 0}
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes | heads | options)
    ).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    train_bpe(["some text for a tokenizer"] * 3, 300, tmp_path / "base" / "tokenizer.json")
    base = open_checkpoint(tmp_path / "base")
    grown = written(grow(base, "memory", 3), tmp_path / "grown")
    assert grown.config.model.num_layers == 6
    assert {info.dtype for info in grown.reader.tensors.values()} == {torch.bfloat16}
    assert (tmp_path / "grown" / "tokenizer").is_dir()

    def logits(opened: OpenedCheckpoint, layout: dict[str, Any]) -> Tensor:
        config = on(replace(opened.config, train=SHARED.train), **layout)
        with joined(config) as groups:
            chunk = chunk_of(config, groups, opened.reader, 300, torch.bfloat16)
            ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(5))
            with torch.no_grad():
                found: Tensor = chunk.eval()(ids, torch.arange(16).expand(2, -1))
            return found

    def main(layout: dict[str, Any]) -> bool:
        before, after = (logits(opened, layout) for opened in (base, grown))
        return bool(before.float().std() > 0.1) and torch.equal(before, after)

    assert run_ranks(lambda: main({}), 1) == [True]
    assert run_ranks(lambda: main({"tensor": 2, "memory": 2}), 2) == [True, True]


def test_what_another_growth_left_unfinished_is_not_taken_for_this_one(base: Path, tmp_path: Path) -> None:
    """Copies and means of blocks have the same names, shapes and files."""
    opened, destination = open_checkpoint(base), tmp_path / "grown"
    blocks = grown_blocks("averaged", num_layers=4, num_inserted=2)
    # In the places of the means.
    copies = [replace(block, sources=block.sources[-1:]) for block in blocks]
    target = ConversionTarget(ParallelConfig(), with_optimizer=False, dtype=None, max_file_bytes=2**20)

    def killed(phase: str, num_bytes: int) -> Any:
        if phase == "read back":
            raise KeyboardInterrupt
        return lambda number: None

    unfinished = upscale(opened, blocks, [], name="grown").checkpoint
    with pytest.raises(KeyboardInterrupt):
        convert(unfinished, FORMATS["megatron-dist"], destination, target, RESOURCES, on_start=killed)
    found = whole(written(upscale(opened, copies, [], name="grown"), destination).reader)
    before = whole(opened.reader)
    for name in ("mlp.linear_fc1.weight", "input_layernorm.weight"):
        assert torch.equal(found[f"decoder.layers.1.{name}"], before[f"decoder.layers.1.{name}"])
