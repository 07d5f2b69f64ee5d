"""Rows that are trained alone (`optimizer.trained_rows`): which they are, by loops over what layers show of their reads, and
that nothing else moves; one rank's run on other layouts, in files and after a resume."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from test_checkpoint_layouts import read_all
from test_read_rows import LAYOUTS, MODELS, REPLICAS, config_of
from test_stored_tables import on_samples
from tiny_runs import VOCAB_SIZE, TinyRun, joined, on, tiny_run
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.parameters.trained_part import Trained
from megamem.placement.spans import PlacementConfig
from pretrain.config.optimizer import TrainedRowsConfig
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tests.rotation import in_rotation, named_in_rotation

NUM_STEPS = 3
NUM_SEQUENCES = 40
Score = Literal["tf_idf", "kl", "reads"]
KINDS = {
    "memory 2 of rows": "shared",
    "tensor 2 x memory 4, 2 of rows": "private",
    "pipeline 2 x virtual 2 x memory 2": "move",
    "context 2 x memory 2": "mome",
    "pipeline 2": "move, unevenly",
    "data 2": "shared",
    "tensor 2 x data 2 x memory 2": "tide",
    "data 4 x memory 2 of rows": "shared",
    "pipeline 2 x data 2": "residual n-grams",
    "data 4": "ultramem",
}


def teaching(config: RunConfig, **rows: Any) -> RunConfig:
    """A run that trains some rows alone, by plain gradients of any length."""
    optimizer = replace(
        config.optimizer, trained_rows=TrainedRowsConfig(**rows), row_rule="sgd", clip_grad=0.0, value_lr=0.5
    )
    return replace(config, optimizer=optimizer)


def write_counts(path: Path, model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Reads of a text in which a third of the rows is not read."""
    generator = torch.Generator().manual_seed(seed)
    counts = {"num_sequences": torch.tensor([NUM_SEQUENCES])}
    for bank in replace(model, vocab_size=VOCAB_SIZE).memory_plan.banks:
        sequences = torch.randint(-NUM_SEQUENCES // 2, NUM_SEQUENCES + 1, (bank.num_rows,), generator=generator).clamp(
            min=0
        )
        more = torch.randint(1, 5, (bank.num_rows,), generator=generator)
        counts |= {f"sequences.banks.{bank.index}": sequences, f"reads.banks.{bank.index}": sequences * more}
    save(counts, path)
    return counts


def save(arrays: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as stream:
        np.savez(stream, **{name: each.numpy() for name, each in arrays.items()})


@dataclass
class Reads:
    """Reads that a memory layer shows, by row (see `megamem.layers.usage.LayerUsage`)."""

    counts: Counter[int]

    def record(self, rows: Tensor, *_: Any) -> None:
        self.counts.update(rows.flatten().tolist())


@contextmanager
def counted(run: TinyRun) -> Iterator[dict[int, Counter[int]]]:
    """Count reads by bank within the block."""
    found: dict[int, Counter[int]] = {}
    for chunk in run.bare:
        for layer in chunk.memory_layers:
            counts = found.setdefault(layer.view.bank, Counter())
            layer.usage = Reads(counts)  # type: ignore[assignment]
    yield found
    for chunk in run.bare:
        for layer in chunk.memory_layers:
            layer.usage = None


def chosen(reads: Counter[int], counts: dict[str, Tensor], bank: int, score: Score, number: int) -> set[int]:
    """The rows of the highest scores, one after the other."""
    total, sequences, known = sum(reads.values()), counts[f"sequences.banks.{bank}"], counts[f"reads.banks.{bank}"] + 1
    scores = {}
    for row, count in reads.items():
        share = Fraction(count, total)
        scores[row] = {
            "tf_idf": share * Fraction(math.log((NUM_SEQUENCES + 1) / (int(sequences[row]) + 1))),
            "kl": share * Fraction(math.log(share / Fraction(int(known[row]), int(known.sum())))),
            "reads": share,
        }[score]
    return set(sorted(scores, key=lambda row: (-scores[row], row))[:number])


def weights_of(run: TinyRun) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in run.bare[0].named_parameters()}


FAMILIES = [kind for kind in MODELS if kind not in ("move, unevenly", "private")]


@pytest.mark.parametrize("kind", in_rotation(FAMILIES))
def test_the_rows_of_the_highest_scores_move_and_nothing_else(run_ranks: Any, tmp_path: Path, kind: str) -> None:
    """By the gradients of a run that trains all rows: those of the rows that are chosen, and the norm of these."""
    number, score = 7, ("tf_idf", "kl", "reads")[FAMILIES.index(kind) % 3]
    config = config_of(MODELS[kind], "rows", "fp32")
    counts = write_counts(tmp_path / "known", config.model, seed=3)
    background = {"background": str(tmp_path / "known")} if score != "reads" else {}
    some = validate(teaching(config, number=number, score=score, **background), 1)
    every = validate(teaching(config), 1)

    def main() -> tuple[list[str], dict[str, int]]:
        found = {}
        for name, each in (("every", every), ("some", some)):
            with tiny_run(each) as run:
                before = weights_of(run)
                with counted(run) as reads:
                    ((_, norm),) = run.train(1)
                found[name] = before, weights_of(run), norm
        (_, all_rows, _), (before, after, norm) = found["every"], found["some"]
        wrong, num_moved, squares = [], {}, 0.0
        for name in before:
            expected = before[name].clone()
            if name.startswith("banks."):
                bank = int(name.split(".")[1])
                rows = sorted(chosen(reads[bank], counts, bank, score, number))
                expected[rows] = all_rows[name][rows]
                num_moved[name] = int((expected != before[name]).any(1).sum())
                squares += float(((expected - before[name]).double() / 0.5).square().sum())
            if not torch.equal(after[name], expected):
                wrong.append(name)
        if abs(norm - math.sqrt(squares)) > 1e-3 * norm:
            wrong.append(f"norm {norm}, not {math.sqrt(squares)}")
        return wrong, num_moved

    ((wrong, num_moved),) = run_ranks(main, 1)
    assert not wrong
    # Rows of no coefficient have no gradient.
    assert num_moved
    assert all(0 < num <= number for num in num_moved.values()), num_moved


def test_a_share_is_rounded_up_and_rows_of_a_text_are_chosen_once(run_ranks: Any, tmp_path: Path) -> None:
    config = config_of(MODELS["shared"], "rows", "fp32")
    known = write_counts(tmp_path / "known", config.model, seed=3)
    told = write_counts(tmp_path / "told", config.model, seed=4)
    by_share = validate(teaching(config, share=0.3, score="reads"), 1)
    by_text = validate(teaching(config, number=40, background=str(tmp_path / "known"), text=str(tmp_path / "told")), 1)

    def main() -> list[Any]:
        found = []
        for each in (by_share, by_text):
            with tiny_run(each) as run:
                before = weights_of(run)
                with counted(run) as reads:
                    run.train(1)
                after = weights_of(run)
            moved = {
                name: set((after[name] != before[name]).any(1).nonzero().flatten().tolist())
                for name in before
                if name.startswith("banks.")
            }
            found.append((moved, reads))
        return found

    (((of_share, reads), (of_text, _)),) = run_ranks(main, 1)
    assert of_share
    for name, rows in of_share.items():
        bank = int(name.split(".")[1])
        assert rows == chosen(reads[bank], known, bank, "reads", math.ceil(Fraction(3, 10) * len(reads[bank])))
    for name, rows in of_text.items():
        bank = int(name.split(".")[1])
        of_bank = Counter(dict(enumerate(told[f"reads.banks.{bank}"].tolist())))
        read = chosen(+of_bank, known, bank, "tf_idf", 40) & reads[bank].keys()
        # The last bit of a row may outweigh its gradient.
        assert rows <= read
        assert 0 < 0.8 * len(read) < len(rows) < 40


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_layout_trains_the_rows_of_one_rank(run_ranks: Any, tmp_path: Path, num_ranks: int) -> None:
    cases = {
        name: (axes, KINDS[name], ("tf_idf", "kl")[number % 2])
        for number, (name, (size, axes)) in enumerate((LAYOUTS | REPLICAS).items())
        if size == num_ranks and name in KINDS
    }
    cases = named_in_rotation(cases)
    for _, kind, _ in cases.values():
        write_counts(tmp_path / kind, MODELS[kind], seed=5)

    def config_for(kind: str, score: str) -> RunConfig:
        config = config_of(MODELS[kind], "rows", "fp32")
        return teaching(config, share=0.4, score=score, background=str(tmp_path / kind))

    def one_rank() -> tuple[dict[str, list[tuple[float, float]]], dict[str, dict[str, Tensor]]]:
        found, initial = {}, {}
        for name, (_, kind, score) in cases.items():
            with tiny_run(config_for(kind, score)) as run:
                initial[name] = weights_of(run)
                found[name] = run.train(NUM_STEPS)
                run.save(tmp_path / "one" / name)
        return found, initial

    def main() -> dict[str, list[tuple[float, float]]]:
        found = {}
        for name, (axes, kind, score) in cases.items():
            config = on(config_for(kind, score), **axes)
            validate(config, num_ranks)
            with tiny_run(config) as run:
                found[name] = run.train(NUM_STEPS)
                run.save(tmp_path / "many" / name)
        return found

    ((expected, initial),) = run_ranks(one_rank, 1)
    for of_rank in run_ranks(main, num_ranks):
        for name, steps in of_rank.items():
            for step, reference in zip(steps, expected[name], strict=True):
                assert step == pytest.approx(reference, rel=2e-5), name
    for name in cases:
        one, many = (read_all(tmp_path / folder / name / f"step_{NUM_STEPS:08d}") for folder in ("one", "many"))
        for weight, before in initial[name].items():
            if not weight.startswith("banks."):
                continue
            of_one, of_many = (each[f"optimizer.state.param.{weight}"] != before for each in (one, many))
            assert of_one.any(), (name, weight)
            assert torch.equal(of_one.any(1), of_many.any(1)), (name, weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_files_and_a_resume_change_no_bits(run_ranks: Any, tmp_path: Path, precision: Literal["fp32", "bf16"]) -> None:
    """Nor does what was trained before lose any: weights that are not trained are those of the checkpoint."""
    kind = "move by n-grams"
    write_counts(tmp_path / "known", MODELS[kind], seed=6)
    whole = config_of(MODELS[kind], "rows", precision)
    on_device = teaching(whole, number=9, background=str(tmp_path / "known"))
    in_files = replace(on_device, optimizer=replace(on_device.optimizer, table_folder=str(tmp_path)))

    def main() -> list[str]:
        with joined(on_device) as groups:
            runs = [on_samples(config, groups) for config in (on_device, in_files)]
            straight, filed = (str(run.train(NUM_STEPS)) for run in runs)
        wrong = [] if straight == filed else [f"steps in files: {filed}, not {straight}"]
        with tiny_run(whole) as run:
            run.train(1)
            run.save(tmp_path / "saved")
            before = weights_of(run)
        with tiny_run(on_device) as run:
            run.resume(tmp_path / "saved" / "step_00000001")
            assert run.run.state.trained == ((1, Trained(None, tables_alone=True)),)
            steps = run.train(1)
            run.save(tmp_path / "saved")
            steps += run.train(2)
            after = weights_of(run)
            run.save(tmp_path / "saved")
        with tiny_run(on_device) as run:
            run.resume(tmp_path / "saved" / "step_00000002")
            again = run.train(2)
            wrong += [name for name, each in weights_of(run).items() if not torch.equal(each, after[name])]
        wrong += [] if again == steps[1:] else [f"steps of a resumed run: {again}, not {steps[1:]}"]
        return wrong + [name for name in before if torch.equal(before[name], after[name]) == name.startswith("banks.")]

    assert run_ranks(main, 1) == [[]]
    tensors = read_all(tmp_path / "saved" / "step_00000004")
    states = [name for name in tensors if name.startswith("optimizer.")]
    assert states
    assert all(".banks." in name for name in states)


def test_layers_are_named_beside_rows(run_ranks: Any) -> None:
    """The tables of one of two layers, and nothing else of it."""
    config = teaching(config_of(MODELS["private"], "rows", "fp32"), number=5, score="reads")
    config = replace(config, optimizer=replace(config.optimizer, trained_layers=(3,)))

    def main() -> set[str]:
        with tiny_run(validate(config, 1)) as run:
            before = weights_of(run)
            run.train(2)
            return {name for name, each in weights_of(run).items() if not torch.equal(each, before[name])}

    assert run_ranks(main, 1) == [{"banks.2.values"}]


def test_files_that_are_not_of_the_model_are_refused(run_ranks: Any, tmp_path: Path) -> None:
    config = config_of(MODELS["shared"], "rows", "fp32")
    write_counts(tmp_path / "other", MODELS["private"], seed=1)
    save({"reads": torch.zeros(3)}, tmp_path / "odd")
    whole = write_counts(tmp_path / "whole", BASE.model, seed=1)
    save(whole | {"reads.banks.0": whole["reads.banks.0"].double()}, tmp_path / "floats")
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(content[: len(content) // 2])
    (tmp_path / "text").write_text("no tensors", encoding="utf-8")
    cases = {
        "none": ("cannot be read", "megamem patch counts"),
        "text": ("is damaged", "megamem patch counts"),
        "cut": ("is damaged", "megamem patch counts"),
        "floats": ("another model", "reads.banks.0"),
        "odd": ("is no file of reads", "megamem patch counts"),
        "other": ("counted with another model", "rows"),
    }

    def main() -> dict[str, str]:
        said = {}
        for name in cases:
            refused = teaching(config, number=3, background=str(tmp_path / name))
            with pytest.raises(ConfigError) as error, tiny_run(refused):
                pass
            said[name] = str(error.value)
        return said

    (said,) = run_ranks(main, 1)
    for name, words in cases.items():
        assert all(word in said[name] for word in ("optimizer.trained_rows.background", str(tmp_path / name), *words))


BASE = config_of(MODELS["shared"], "rows", "fp32")
assert BASE.model.memory is not None
SOMEWHERE = replace(BASE.model.memory, placement=PlacementConfig(blocks=(0, 1, 2, 3)))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"tables": "adamw", "table_gradients": "dense"}, ("tables adamw", "tables: row_wise")),
        ({"table_gradients": "dense"}, ("table_gradients dense", "table_gradients: rows")),
        ({"value_weight_decay": 0.1}, ("weight decay 0.1", "value_weight_decay: 0")),
        ({"value_weight_decay": None}, ("weight decay 0.1", "value_weight_decay: 0")),
        ({"trained_layers": (5,)}, ("trained_layers [5] read no table", "[1, 2, 3, 4]")),
        ({"trained_rows": TrainedRowsConfig(number=3)}, ("background is null", "megamem patch counts", "score: reads")),
        ({"trained_rows": TrainedRowsConfig(share=0.5, score="kl")}, ("score is kl", "background is null")),
        ({"trained_rows": TrainedRowsConfig(share=0.5, background="")}, ("background is empty",)),
    ],
)
def test_what_moves_more_than_rows_is_refused(optimizer: dict[str, Any], words: tuple[str, ...]) -> None:
    config = teaching(BASE, number=3, score="reads")
    config = replace(config, model=replace(config.model, num_layers=5, memory=SOMEWHERE))
    validate(config, 1)
    with pytest.raises(ConfigError) as refused:
        validate(replace(config, optimizer=replace(config.optimizer, **optimizer)), 1)
    assert all(word in str(refused.value) for word in ("optimizer.trained_rows", *words))


def test_a_model_without_memory_has_no_rows() -> None:
    config = teaching(BASE, number=3, score="reads")
    with pytest.raises(ConfigError, match=r"trained_rows is set, and model\.memory is null"):
        validate(replace(config, model=replace(config.model, memory=None)), 1)
