"""The model that a patch is of, and the rows in which two checkpoints differ: to the bit, in the coarser dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from in_memory import InMemory
from torch import Tensor

from megamem.config.model import ModelConfig
from pretrain.config.schema import RunConfig
from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.names import HUGGINGFACE, NATIVE
from pretrain.convert.resources import Resources
from pretrain.errors import CheckpointError
from pretrain.patch.file import Patch, read_patch
from pretrain.patch.identity import difference_of_model
from pretrain.patch.make import MadePatch, make_patch

TABLE, MAIN, OTHER = "banks.0.values", "optimizer.state.param.banks.0.values", "banks.3.pre_values"
EMBEDDING, WEIGHT, NORM = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.weight",
    "decoder.final_layernorm.weight",
)
FURTHER, BUFFER, NUMBERS = "multi_token.layers.0.weight", "decoder.layers.0.memory.u", "decoder.layers.0.memory.ids"
NUM_IDS = 11
PIECES = cast(Resources, SimpleNamespace(piece_bytes=64, num_workers=2))


def weights() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(5)
    return {
        EMBEDDING: torch.randn(16, 4, generator=numbers),
        WEIGHT: torch.randn(9, 5, generator=numbers),
        NORM: torch.randn(7, generator=numbers),
        FURTHER: torch.randn(3, 3, generator=numbers),
        BUFFER: torch.randn(4, generator=numbers),
        NUMBERS: torch.arange(6),
        TABLE: torch.randn(50, 6, generator=numbers),
        OTHER: torch.randn(20, 3, generator=numbers),
    }


def opened(tensors: dict[str, Tensor], format_name: str = NATIVE) -> OpenedCheckpoint:
    config = replace(RunConfig(), model=replace(ModelConfig(), vocab_size=NUM_IDS))
    return OpenedCheckpoint(Path("run"), format_name, InMemory(tensors), config)


def make(
    path: Path, before: dict[str, Tensor], after: dict[str, Tensor], max_bytes: int = 1 << 20
) -> tuple[MadePatch, Patch]:
    made = make_patch(
        opened(before),
        opened(after),
        path,
        max_bytes=max_bytes,
        resources=PIECES,
        on_start=lambda *_: lambda _: None,
    )
    return made, read_patch(path)


def changed(tensors: dict[str, Tensor], rows: dict[str, list[int]]) -> dict[str, Tensor]:
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, numbers in rows.items():
        tensors[name][numbers] += 1
    return tensors


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    before = weights()
    _, patch = make(tmp_path_factory.mktemp("patch") / "p", before, changed(before, {TABLE: [1]}))
    assert set(patch.about.identity) == {EMBEDDING, WEIGHT, NORM, FURTHER, NUMBERS}
    return dict(patch.about.identity)


def difference(identity: dict[str, str], tensors: dict[str, Tensor], format_name: str = NATIVE) -> str | None:
    return difference_of_model(identity, opened(tensors, format_name), PIECES, lambda *_: lambda _: None)


def test_a_model_is_known_in_every_dtype_and_format(identity: dict[str, str]) -> None:
    tensors = weights()
    padded = {**tensors, EMBEDDING: torch.cat([tensors[EMBEDDING][:NUM_IDS], torch.zeros(9, 4)])}
    for model in (
        tensors,
        rounded(tensors),
        padded,
        without(tensors, BUFFER),
        changed(tensors, {TABLE: [3], BUFFER: [0]}),
    ):
        assert difference(identity, model) is None
    assert difference(identity, without(tensors, FURTHER), HUGGINGFACE) is None


@pytest.mark.parametrize("name", [EMBEDDING, WEIGHT, NORM, FURTHER, NUMBERS])
def test_another_model_is_named(identity: dict[str, str], name: str) -> None:
    tensors = weights()
    for row in (0, min(NUM_IDS, len(tensors[name])) - 1):
        assert difference(identity, changed(tensors, {name: [row]})) == f"{name} has other values in run"
    assert difference(identity, without(tensors, name)) == f"{name} is not in run"
    assert difference({key: identity[key] for key in identity if key != name}, tensors) == (
        f"{name} is in run, and not in that model"
    )
    # The same elements in another shape.
    other = {**tensors, name: tensors[name].reshape(1, -1)}
    assert difference(identity, other) == f"{name} has other values in run"


def test_all_that_differs_is_counted(identity: dict[str, str]) -> None:
    tensors = changed(weights(), {WEIGHT: [0], NORM: [0], NUMBERS: [2]})
    found = difference(identity, tensors)
    assert found == f"{WEIGHT} has other values in run, and so have 2 more weights"


def test_rows_are_those_that_differ(tmp_path: Path) -> None:
    before = weights()
    rows = {TABLE: [0, 7, 8, 49], OTHER: [19]}
    after = changed(before, rows)
    made, patch = make(tmp_path / "p", before, after)
    assert made.rows == {name: len(numbers) for name, numbers in rows.items()}
    assert made.shapes == patch.about.shapes == {TABLE: (50, 6), OTHER: (20, 3)}
    for name, numbers in rows.items():
        assert patch.row_ids(name).tolist() == numbers
        assert torch.equal(patch.read("before", name, 0, len(numbers)), before[name][numbers])
        assert torch.equal(patch.read("after", name, 0, len(numbers)), after[name][numbers])
    assert [(origin.before, origin.after) for origin in patch.about.made_of] == [("run", "run")]
    # A table without changes has no place in it.
    _, one = make(tmp_path / "q", before, changed(before, {OTHER: [2]}))
    assert one.tables == [OTHER]


def test_no_bit_hides(tmp_path: Path) -> None:
    before = weights()
    before[TABLE][3, 1], before[TABLE][4, 2], before[TABLE][5] = 0.0, float("nan"), float("nan")
    after = {name: tensor.clone() for name, tensor in before.items()}
    after[TABLE][3, 1], after[TABLE][4, 2], after[TABLE][6, 0] = -0.0, 1.0, float("nan")
    assert make(tmp_path / "p", before, after)[1].row_ids(TABLE).tolist() == [3, 4, 6]


def test_main_weights_are_taken_where_they_are(tmp_path: Path) -> None:
    main = weights()[TABLE]
    before = {**rounded(weights()), MAIN: main}
    after = {**rounded(weights()), MAIN: main.clone()}
    # Less than bf16 tells.
    after[MAIN][9, 0] += 2**-20
    _, patch = make(tmp_path / "p", before, after)
    assert patch.row_ids(TABLE).tolist() == [9]
    assert torch.equal(patch.read("after", TABLE, 0, 1), after[MAIN][[9]])
    # Beside bf16 rows it does not.
    after = {**without(after, MAIN), TABLE: after[TABLE].clone()}
    after[TABLE][30] += 1
    _, patch = make(tmp_path / "q", before, after)
    assert patch.row_ids(TABLE).tolist() == [30]
    assert (patch.dtype("before", TABLE), patch.dtype("after", TABLE)) == (torch.float32, torch.bfloat16)


def test_weights_are_equal_in_the_coarser_dtype(tmp_path: Path) -> None:
    before = weights()
    after = changed(rounded(before), {TABLE: [3]})
    assert make(tmp_path / "p", before, after)[1].row_ids(TABLE).tolist() == [3]
    finer = changed(before, {TABLE: [3]})
    finer[WEIGHT][0, 0] = torch.nextafter(finer[WEIGHT][0, 0], torch.tensor(9.0))
    with pytest.raises(CheckpointError, match=f"differ in {WEIGHT}, and a patch has rows of tables alone"):
        make(tmp_path / "q", before, finer)
    with pytest.raises(CheckpointError, match=f"differ in {FURTHER}, and"):
        make(tmp_path / "q", before, without(changed(before, {TABLE: [3]}), FURTHER))
    padding = changed(before, {TABLE: [3], EMBEDDING: [NUM_IDS]})
    make(tmp_path / "q", before, padding)


def test_tables_of_other_shapes_are_named(tmp_path: Path) -> None:
    before = weights()
    larger = {**before, TABLE: torch.zeros(51, 6)}
    with pytest.raises(
        CheckpointError, match=rf"{TABLE} has the shape \(50, 6\) in the first, and \(51, 6\) in the second"
    ):
        make(tmp_path / "p", before, larger)
    for first, second in ((before, without(before, OTHER)), (without(before, OTHER), before)):
        with pytest.raises(CheckpointError, match=f"{OTHER} has the shape"):
            make(tmp_path / "p", first, second)
    dense = without(before, TABLE, OTHER)
    with pytest.raises(CheckpointError, match="has no memory tables"):
        make(tmp_path / "p", dense, dense)


def test_too_large_a_patch_is_given_up(tmp_path: Path) -> None:
    before = weights()
    after = changed(before, {TABLE: list(range(50)), OTHER: [1]})
    with pytest.raises(
        CheckpointError, match=r"rows of banks\.0\.values differ \(100\.0%\), and the patch would be larger"
    ):
        make(tmp_path / "p", before, after, max_bytes=300)
    # Rows of one table leave no room for the next.
    with pytest.raises(CheckpointError, match=r"1 of the first \d+ rows of banks\.3\.pre_values"):
        make(tmp_path / "p", before, after, max_bytes=50 * (8 + 48) + 30)
    make(tmp_path / "p", before, after, max_bytes=50 * (8 + 48) + 32)
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
