"""A trained run is evaluated alike on every layout, uses its memory, and continues prompts reproducibly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Megamem, evaluations

from pretrain.checkpoint.folder import sealed
from pretrain.config.schema import ParallelConfig
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.engine.session import session
from pretrain.evaluation.restore import restore_model
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config
from tests.deadline import launch_within


def evaluate(megamem: Megamem, run: Path, *options: object) -> dict[str, Any]:
    result = megamem("eval", run, "--json", *options)
    assert result.code == 0, result.output
    row: dict[str, Any] = json.loads(result.last_line)
    return row


def test_every_layout_evaluates_alike(megamem: Megamem, config_file: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megamem(
        "train",
        config_file,
        "--run-dir",
        run,
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.memory=2",
        "train.num_steps=6",
        "train.sequence_length=128",
        "evaluation.max_sequences=null",
        f"evaluation.datasets=[{{path: {corpus}}}, {{path: {corpus}, name: again}}]",
    )
    assert result.code == 0, result.output
    (trained,) = evaluations(run)
    for options in (("--nproc", 1), ("--nproc", 2), ("--own-layout",)):
        row = evaluate(megamem, run, *options)
        assert list(row["domains"]) == ["data", "again"]
        for found, wanted in (
            (row, trained),
            *((row["domains"][name], trained["domains"][name]) for name in row["domains"]),
        ):
            for key in ("validation_loss", "bits_per_byte"):
                assert found[key] == pytest.approx(wanted[key], rel=1e-5)
            for key in ("validation_tokens", "validation_bytes"):
                assert found[key] == wanted[key]
        assert row["checkpoint"].endswith("step_00000006")
        nats = [part["validation_loss"] * part["validation_tokens"] for part in (row, *row["domains"].values())]
        assert nats[0] == pytest.approx(nats[1] + nats[2], rel=1e-6)


def test_the_trained_model_uses_its_memory(megamem: Megamem, trained: Path) -> None:
    """Switched off, its validation loss is clearly worse; so the memory does work that the rest of the model does not."""
    with_memory = evaluate(megamem, trained)
    without_memory = evaluate(megamem, trained, "--without-memory")
    assert without_memory["validation_loss"] > with_memory["validation_loss"] + 0.1
    assert without_memory["validation_tokens"] == with_memory["validation_tokens"]
    assert with_memory["bits_per_byte"] < 8
    assert 0 < with_memory["xz -9 bits_per_byte"] < with_memory["bits_per_byte"]
    both = evaluate(megamem, trained, "--ablate")
    assert both.pop("without_memory")["bits_per_byte"] == without_memory["bits_per_byte"]
    assert both == with_memory


def test_an_earlier_step_can_be_evaluated(megamem: Megamem, trained: Path) -> None:
    early, late = evaluate(megamem, trained, "--step", 80), evaluate(megamem, trained)
    assert early["checkpoint"].endswith("step_00000080")
    assert early["validation_loss"] > late["validation_loss"]


def test_a_step_that_is_not_there_is_told_which_are(megamem: Megamem, trained: Path) -> None:
    for command in ("eval", "generate"):
        result = megamem(command, trained, "--step", 81)
        assert result.code == 4
        assert "has no checkpoint of step 81: there are 80, 160" in " ".join(result.output.split())


def test_data_that_has_moved_is_named_by_hand(megamem: Megamem, trained: Path, corpus: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    for state in run.glob("checkpoints/*/state.json"):
        content = json.loads(state.read_text().replace(str(corpus), str(tmp_path / "gone")))
        state.write_text(json.dumps(sealed(content)))
    result = megamem("eval", run)
    assert result.code == 3
    said = " ".join(result.output.split())
    assert "gone: no such data set" in said
    assert f"If it is elsewhere now: `megamem eval {run} --data DIR`" in said
    assert evaluate(megamem, run, "--data", corpus) == {
        **evaluate(megamem, trained),
        "checkpoint": str(run / "checkpoints" / "step_00000160"),
    }


def test_data_of_another_tokenizer_is_refused(megamem: Megamem, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name, text in (("a", "some words and some more"), ("b", "other words")):
        (tmp_path / "corpus" / f"{name}.txt").write_text(100 * text)
    tokenizer = tmp_path / "tokenizer.json"
    assert megamem("data", "tokenizer", tmp_path / "corpus", "--vocab-size", 280, "--output", tokenizer).code == 0
    other = tmp_path / "other"
    made = megamem(
        "data",
        "prepare",
        tmp_path / "corpus",
        "--tokenizer",
        tokenizer,
        "--validation-fraction",
        0.5,
        "--output",
        other,
    )
    assert made.code == 0, made.output
    result = megamem("eval", trained, "--data", other)
    assert result.code == 3
    assert "prepared with another tokenizer than the run's" in " ".join(result.output.split())


def test_what_an_evaluation_can_override(megamem: Megamem, trained: Path) -> None:
    longer = evaluate(megamem, trained, "train.sequence_length=64", "train.micro_batch_size=2")
    assert longer["validation_loss"] != evaluate(megamem, trained)["validation_loss"]
    result = megamem("eval", trained, "model.num_layers=3")
    assert result.code == 2
    assert "model.num_layers=3 has no place in an evaluation" in result.output


def test_a_config_edited_by_hand_is_told_that_it_does_not_count(
    megamem: Megamem, trained: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    assert "note:" not in megamem("generate", run, "--max-tokens", 1).output
    config = run / "config.yaml"
    config.write_text(
        config.read_text().replace("hidden_size: 32", "hidden_size: 64", 1).replace("lr: 0.01", "lr: 0.02")
    )
    for words in (("eval", run), ("generate", run, "--max-tokens", 1)):
        result = megamem(*words)
        assert result.code == 0, result.output
        assert "config.yaml differs from the configuration in" in result.output
        assert "model.hidden_size: 32 -> 64" in result.output
        assert "lr" not in result.output.partition("config.yaml differs")[2].partition("\n")[0]
    config.write_text("[")
    assert f"note: {config} is not read, as the checkpoint holds the configuration" in megamem("eval", run).output


def test_samples_stops_and_prompts_from_files(megamem: Megamem, trained: Path, tmp_path: Path) -> None:
    first, second = (generate(megamem, trained, "--seed", seed).removesuffix("\n") for seed in (7, 8))
    expected = f"--- sample 1 of 2 (seed 7) ---\n{first}\n--- sample 2 of 2 (seed 8) ---\n{second}\n"
    (tmp_path / "prompt").write_text("def ")
    for number in (1, 2):
        result = megamem(
            "generate",
            trained,
            "--prompt-file",
            tmp_path / "prompt",
            "--max-tokens",
            30,
            "--seed",
            7,
            "--samples",
            2,
            "--nproc",
            number,
        )
        assert result.generated == expected
    stop = first.removeprefix("def ")[3:5]
    cut = "def " + first.removeprefix("def ").partition(stop)[0]
    for number in (1, 2):
        assert generate(megamem, trained, "--seed", 7, "--stop", stop, "--nproc", number) == cut + "\n"
    result = megamem("generate", trained, "--prompt-file", tmp_path / "none")
    assert result.code == 2
    assert "--prompt-file is" in result.output


def test_the_table_for_people(megamem: Megamem, trained: Path) -> None:
    result = megamem("eval", trained, "--nproc", 1)
    assert result.code == 0
    assert "this model" in result.output
    assert "gzip -9" in result.output


def test_a_dense_model_has_no_memory_to_switch_off(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megamem("train", config_file, "--run-dir", run, "model.memory=null", "train.num_steps=3")
    assert result.code == 0, result.output
    assert "dense" in result.output
    result = megamem("eval", run, "--without-memory")
    assert result.code == 2
    assert "is a model without memory: leave --without-memory out" in " ".join(result.output.split())


def generate(megamem: Megamem, run: Path, *options: object) -> str:
    result = megamem("generate", run, "--max-tokens", 30, "--prompt", "def ", *options)
    assert result.code == 0, result.output
    assert result.output.startswith("def ")
    return result.generated


def test_generation_follows_from_the_seed(megamem: Megamem, trained: Path) -> None:
    text = generate(megamem, trained, "--seed", 5)
    assert generate(megamem, trained, "--seed", 5) == text
    assert generate(megamem, trained, "--seed", 6) != text
    assert len(text) > len("def \n")


def test_temperature_0_takes_the_likeliest(megamem: Megamem, trained: Path) -> None:
    """Token by token by the model's forward pass, over no more than the length that it was trained on."""
    saved = find_checkpoint(RunFolder(trained), None)
    config = saved_config(saved, ParallelConfig())
    length, vocab_size, end = config.train.sequence_length, 257, 256

    def continuation() -> list[int]:
        tokenizer = ByteTokenizer()
        ids = [end, *b"def "]
        with session(config) as groups, torch.no_grad():
            (model,) = restore_model(config, saved.path, tokenizer, groups)
            for _ in range(30):
                seen = torch.tensor([ids[max(0, len(ids) - length) :]])
                logits = model(seen, torch.arange(seen.shape[1]).unsqueeze(0))[0, -1].tolist()[:vocab_size]
                likeliest = logits.index(max(logits))
                if likeliest == end:
                    break
                ids.append(likeliest)
        return ids[1:]

    (ids,) = launch_within(continuation, 1, timeout_s=120)
    # More than fits into a context, or the oldest tokens' leaving would not be tried.
    assert len(ids) == 34 > length
    expected = bytes(ids).decode(errors="replace") + "\n"
    assert generate(megamem, trained, "--temperature", 0, "--seed", 9) == expected


def test_tables_that_are_split_over_ranks_generate_the_same_text(megamem: Megamem, trained: Path) -> None:
    """The first rank has all the tokens, the others none; all of them take part in every lookup."""
    for options in (("--temperature", 0), ("--seed", 5)):
        assert generate(megamem, trained, "--nproc", 4, *options) == generate(megamem, trained, *options)


def test_tables_are_split_into_equal_parts_only(megamem: Megamem, trained: Path) -> None:
    result = megamem("generate", trained, "--nproc", 3)
    assert result.code == 2
    assert "model.memory.value_dim is 32, which parallel.memory 3 does not divide" in result.output


def test_prompts_longer_than_the_context_and_beyond_ascii(megamem: Megamem, trained: Path) -> None:
    prompt = "naïve — 日本語 " * 20
    result = megamem("generate", trained, "--max-tokens", 3, "--prompt", prompt)
    assert result.code == 0, result.output
    assert prompt in result.output
    assert "tokens, of which the model sees the last 32 (train.sequence_length)" in result.output


@pytest.mark.parametrize(
    "options",
    [
        ("--temperature", -1),
        ("--temperature", "nan"),
        ("--top-p", 0),
        ("--top-p", 1.5),
        ("--max-tokens", 0),
        ("--top-k", 0),
        ("--samples", 0),
        ("--stop", ""),
        ("--seed", -1),
        ("--temperature", "warm"),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_impossible_sampling(megamem: Megamem, trained: Path, options: tuple[object, ...]) -> None:
    result = megamem("generate", trained, *options)
    assert result.code == 2, result.output
    assert "Traceback" not in result.output


def test_a_run_on_uneven_stages_is_evaluated_and_goes_on_on_even_ones(
    megamem: Megamem, config_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = ("train", config_file, "--run-dir", run, "parallel.pipeline=2", "train.sequence_length=128")
    uneven = megamem(*common, "parallel.pipeline_layout=E|t*4L", "train.num_steps=3")
    assert uneven.code == 0, uneven.output
    here, there = (evaluate(megamem, run, *options) for options in (("--own-layout",), ("--nproc", 1)))
    assert here["validation_loss"] == pytest.approx(there["validation_loss"], rel=1e-5)
    even = megamem(*common, "train.num_steps=4")
    assert even.code == 0, even.output
    assert "changed since: parallel.pipeline_layout: E|t*4L -> None" in even.output
    assert [row["step"] for row in evaluations(run)] == [3, 4]
    split = megamem(*common, "parallel.pipeline_layout=Ettt|tL", "train.num_steps=5")
    assert split.code == 2
    assert "splits blocks 2..3" in split.output


def test_a_run_on_cut_sequences_is_evaluated_and_goes_on_on_whole_ones(
    megamem: Megamem, config_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = ("train", config_file, "--run-dir", run, "parallel.memory=2", "train.sequence_length=64")
    cut = megamem(*common, "parallel.context=2", "train.num_steps=3", "evaluation.max_sequences=null")
    assert cut.code == 0, cut.output
    assert "2 ranks (tensor 1 x pipeline 1 x context 2 x data 1)" in cut.output
    (trained,) = evaluations(run)
    for options in (("--own-layout",), ("--nproc", 1)):
        row = evaluate(megamem, run, *options)
        assert row["validation_loss"] == pytest.approx(trained["validation_loss"], rel=1e-5)
        assert row["validation_tokens"] == trained["validation_tokens"]
    assert len(generate(megamem, run)) > len("def \n")
    whole = megamem(*common, "train.num_steps=4")
    assert whole.code == 0, whole.output
    assert "changed since: " in whole.output
    assert "parallel.context: 2 -> 1" in whole.output
    assert [row["step"] for row in evaluations(run)] == [3, 4]
