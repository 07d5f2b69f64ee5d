"""Prompts and answers: prompts are lower case here and answers upper case, so that every byte tells whether it is scored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pretrain.data.prepare
from pretrain.config.schema import DatasetEntry
from pretrain.data.dataset import TrainDataset, build_train_dataset, check_targets
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.indexed_files import IndexedWriter
from pretrain.data.manifest import PreparedDataset, open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.sources import PairFields
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.errors import DataError
from tools.cli import main as megamem

EOD = ByteTokenizer().eod
NAMES = PairFields("question", "reply")
LENGTH = 16


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Some prompts are longer than a sample, and some are empty."""
    random = np.random.RandomState(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        (
            "".join(random.choice(list(letters), random.randint(0, 40))),
            "".join(random.choice(list(letters.upper()), random.randint(1, 30))),
        )
        for _ in range(count)
    ]


def write(path: Path, of: list[tuple[str, str]]) -> str:
    lines = [json.dumps({"question": prompt, "reply": answer, "id": 1}) for prompt, answer in of]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def prepared(
    folder: Path, of: list[tuple[str, str]], validation_fraction: float = 0.2, workers: int = 1
) -> PreparedDataset:
    path = folder.with_suffix(".jsonl")
    source = str(path) if path.exists() else write(path, of)
    result = prepare(
        [source],
        folder,
        ByteTokenizer(),
        pair=NAMES,
        validation_fraction=validation_fraction,
        num_workers=workers,
    )
    return result.dataset


def is_scored(ids: Tensor) -> Tensor:
    """Scored tokens, told by the letters alone."""
    return (ids == EOD) | ((ids >= ord("A")) & (ids <= ord("Z")))


def prompt_lengths(dataset: PreparedDataset, split: str) -> list[int]:
    """Tokens of each document before the first that is scored; all behind it are."""
    scored, start, found = dataset.open_scored(split), 0, []
    assert scored is not None
    for ids in dataset.open_split(split):
        flags = scored.flags(start, start + len(ids))
        found.append(int(flags.argmax()))
        assert flags[found[-1] :].all()
        start += len(ids)
    return found


def test_every_pair_is_a_document_of_prompt_answer_and_end(tmp_path: Path) -> None:
    of = pairs(50)
    dataset = prepared(tmp_path / "data", of, validation_fraction=0.0)
    documents, lengths = dataset.open_split("train"), prompt_lengths(dataset, "train")
    for (prompt, answer), ids, length in zip(of, documents, lengths, strict=True):
        assert bytes(ids[:-1].tolist()).decode() == prompt + answer
        assert ids[-1] == EOD
        assert length == len(prompt)
    # Files of earlier versions have the same bytes.
    listed = np.fromfile(dataset.path / "train.prompts", "<i4").reshape(-1, 2)
    assert listed.tolist() == [[len(prompt), len(prompt)] for prompt, _ in of]
    info = dataset.manifest.splits["train"]
    assert info.num_scored_tokens == sum(len(answer) + 1 for _, answer in of)
    assert info.num_scored_bytes == sum(len(answer) for _, answer in of)
    assert info.num_bytes == sum(len(prompt) + len(answer) for prompt, answer in of)


def train_data(folder: Path, *datasets: PreparedDataset, num_samples: int = 60, **options: Any) -> TrainDataset:
    return build_train_dataset(
        [DatasetEntry(str(dataset.path)) for dataset in datasets],
        sequence_length=LENGTH,
        num_samples=num_samples,
        seed=3,
        tokenizer=ByteTokenizer(),
        cache_dir=folder / "cache",
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"separate_documents": True}, {"shuffle": "samples"}], ids=str)
def test_answers_and_their_ends_count_and_prompts_do_not(tmp_path: Path, options: dict[str, Any]) -> None:
    """Samples begin and end anywhere, within prompts too, over several passes."""
    data = train_data(tmp_path, prepared(tmp_path / "data", pairs(40)), num_samples=150, **options)
    masks = []
    for sample in (data[number] for number in range(len(data))):
        assert torch.equal(sample["loss_mask"], is_scored(sample["labels"]).float())
        assert sample["loss_mask"].dtype == torch.float32
        masks.append(sample["loss_mask"])
    shares = torch.stack(masks).mean(1)
    assert shares.min() == 0
    assert shares.max() == 1


def test_a_blend_scores_all_of_its_plain_texts(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text("\n".join(json.dumps({"text": "0123456789" * 3}) for _ in range(20)))
    plain = prepare([str(tmp_path / "plain.jsonl")], tmp_path / "plain", ByteTokenizer(), num_workers=1).dataset
    data = train_data(tmp_path, prepared(tmp_path / "data", pairs(40)), plain)
    seen = set()
    for number in range(len(data)):
        sample = data[number]
        digits = sample["labels"] < ord("A")
        seen.add(bool(digits.any()))
        assert torch.equal(sample["loss_mask"], (is_scored(sample["labels"]) | digits).float())
    assert seen == {True, False}


@pytest.mark.parametrize("max_sequences", [None, 5])
def test_evaluation_codes_the_answers(tmp_path: Path, max_sequences: int | None) -> None:
    dataset = prepared(tmp_path / "data", pairs(40))
    held_out = HeldOutDataset([DatasetEntry(str(dataset.path))], LENGTH, max_sequences)
    windows = [held_out[number] for number in range(len(held_out))]
    counted = [window["labels"][window["loss_mask"] > 0] for window in windows]
    stream = torch.from_numpy(np.concatenate([ids.astype(np.int64) for ids in dataset.open_split("validation")]))
    stream = stream[: None if max_sequences is None else max_sequences * LENGTH]
    scored = stream[is_scored(stream)]
    assert torch.equal(torch.cat(counted), scored)
    assert held_out.num_target_tokens == len(scored)
    assert held_out.num_bytes == int((scored != EOD).sum())
    assert [(domain.num_target_tokens, domain.num_bytes) for domain in held_out.domains] == [
        (held_out.num_target_tokens, held_out.num_bytes)
    ]


def test_evaluation_of_several_domains_counts_each(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text("\n".join(json.dumps({"text": "0123456789"}) for _ in range(20)))
    plain = prepare([str(tmp_path / "plain.jsonl")], tmp_path / "plain", ByteTokenizer(), num_workers=1).dataset
    mine = prepared(tmp_path / "data", pairs(40))
    held_out = HeldOutDataset([DatasetEntry(str(mine.path)), DatasetEntry(str(plain.path))], LENGTH)
    counts = torch.zeros(2, dtype=torch.int64)
    for number in range(len(held_out)):
        window = held_out[number]
        counts.index_add_(0, window["domains"], window["loss_mask"].long())
    assert [domain.num_target_tokens for domain in held_out.domains] == counts.tolist()
    assert counts[1] == plain.manifest.splits["validation"].num_tokens
    assert counts[0] == mine.manifest.splits["validation"].num_scored_tokens


def files(dataset: PreparedDataset) -> dict[str, bytes]:
    return {name: (dataset.path / name).read_bytes() for name, _, _ in dataset.manifest.files}


def test_a_preparation_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = pairs(60)
    whole = files(prepared(tmp_path / "whole", of))
    assert {"train.prompts", "validation.prompts"} < whole.keys()
    monkeypatch.setattr(pretrain.data.prepare, "NOTE_EVERY_S", 0.0)
    add, count = IndexedWriter.add, 0

    def cut_off(self: IndexedWriter, *document: object) -> None:
        nonlocal count
        count += 1
        if count == 37:
            raise KeyboardInterrupt
        add(self, *document)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "add", cut_off)
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / "cut", of)
    assert not (tmp_path / "cut").exists()
    added: list[object] = []
    monkeypatch.setattr(IndexedWriter, "add", lambda self, *document: (added.append(0), add(self, *document)))
    assert files(prepared(tmp_path / "cut", of)) == whole
    assert len(added) == 60 - 36


def test_the_number_of_workers_does_not_matter(tmp_path: Path) -> None:
    of = pairs(30)
    assert files(prepared(tmp_path / "one", of)) == files(prepared(tmp_path / "two", of, workers=2))


def test_the_one_document_that_is_held_out_takes_its_prompt_along(tmp_path: Path) -> None:
    of = pairs(4, seed=1)
    dataset = prepared(tmp_path / "data", of, validation_fraction=1e-9)
    found = []
    for split in ("train", "validation"):
        for ids, length in zip(dataset.open_split(split), prompt_lengths(dataset, split), strict=True):
            text = bytes(ids[:-1].tolist()).decode()
            found.append((text[:length], text[length:]))
    assert dataset.manifest.splits["validation"].num_documents == 1
    assert sorted(found) == sorted(of)


def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"question": "why"}\n')
    with pytest.raises(DataError, match=r"the field 'reply' is missing \(present: question\); .* --answer-field"):
        prepare([str(path)], tmp_path / "out", ByteTokenizer(), pair=NAMES, num_workers=1)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="are read from JSON lines"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", ByteTokenizer(), pair=NAMES, num_workers=1)
    source = write(tmp_path / "one.jsonl", [("a", "B")])
    with pytest.raises(DataError, match="only one prompt with an answer"):
        prepare([source], tmp_path / "out", ByteTokenizer(), pair=NAMES, num_workers=1)
    with pytest.raises(DataError, match="--cut-documents would part answers"):
        prepare([source], tmp_path / "out", ByteTokenizer(), pair=NAMES, cut_documents=9, num_workers=1)
    # Without an answer there is nothing to learn.
    source = write(tmp_path / "some.jsonl", [("a", "B"), ("c", ""), ("", "D")])
    dataset = prepare([source], tmp_path / "some", ByteTokenizer(), pair=NAMES, num_workers=1).dataset
    assert dataset.manifest.num_empty == 1


def test_damaged_prompts_are_found(tmp_path: Path) -> None:
    path = prepared(tmp_path / "data", pairs(20)).path
    file = path / "train.prompts"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match=r"train\.prompts is not the file that was"):
        open_dataset(path).verify()
    file.write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"train\.prompts has \d+ bytes where \d+ were written"):
        open_dataset(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "some.jsonl", pairs(20))
    command = ["data", "prepare", source, "--output", str(tmp_path / "out"), "--workers", "1"]
    assert megamem([*command, "--prompt-field", "question"]) == 3
    assert "give both" in capsys.readouterr().err
    both = ["--prompt-field", "question", "--answer-field", "reply"]
    assert megamem([*command, *both, "--field", "x"]) == 3
    assert "--field has no effect" in capsys.readouterr().err
    assert megamem([*command, *both]) == 0
    assert "tokens of answers" in capsys.readouterr().out
    assert megamem([*command, *both]) == 0
    assert "already complete" in capsys.readouterr().out
    assert megamem(["data", "inspect", str(tmp_path / "out"), "--documents", "1"]) == 0
    assert re.search(r"---\n[a-z]*«[A-Z]+»\n$", capsys.readouterr().out)
    assert megamem(command) == 3
    assert "other arguments" in capsys.readouterr().err


def test_a_data_set_of_an_earlier_version_is_read_as_it_was(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "data", pairs(20))
    expected = [prompt_lengths(dataset, split) for split in ("train", "validation")]
    file = dataset.path / "manifest.json"
    values = json.loads(file.read_text())
    # There were no other files of what is scored, no templates, and once no digest.
    del values["digest"], values["tokenizer"]["chat"]
    for split in values["splits"].values():
        del split["scored"]
    file.write_text(json.dumps(values))
    old = open_dataset(dataset.path)
    assert [prompt_lengths(old, split) for split in ("train", "validation")] == expected
    assert old.manifest.content_fingerprint == dataset.manifest.content_fingerprint
    again = prepared(tmp_path / "data", pairs(20))
    assert again.manifest.request_fingerprint == old.manifest.request_fingerprint


def test_samples_without_a_target_are_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, [("x" * 4000, "y") for _ in range(30)], validation_fraction=0.0)
    samples = train_data(tmp_path, dataset, num_samples=800)
    first = next(index for index in range(800) if bool(samples[index]["loss_mask"].any()))
    check_targets(samples, first, [dataset.path])
    # Without prompts every token is a target, and nothing is read.
    check_targets(samples, first + 1, [])
    until = train_data(tmp_path, dataset, num_samples=first)
    with pytest.raises(
        DataError, match=rf"The next {first} samples of \d+ tokens have no target: .*train.sequence_length"
    ):
        check_targets(until, 0, [dataset.path])


def test_an_answer_of_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"question": "a", "reply": null}\n{"question": null, "reply": "B"}\n{"question": "c", "reply": "D"}\n'
    )
    made = prepare([str(path)], tmp_path / "out", ByteTokenizer(), pair=NAMES, validation_fraction=0, num_workers=1)
    assert made.dataset.manifest.num_empty == 1
    split = made.dataset.open_split("train")
    assert [split[index].tolist() for index in range(len(split))] == [[ord("B"), EOD], [ord("c"), ord("D"), EOD]]
