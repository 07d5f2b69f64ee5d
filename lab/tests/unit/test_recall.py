"""Facts, the documents that state them, and what asking for them counts."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch

from lab.facts import FACT_LETTERS, GUESS_NATS, MAX_FACTS, documents, make_facts, write_documents
from lab.studies.compare.rules import ModelFigures
from lab.studies.recall.asking import Recall, _batches, asked
from lab.studies.recall.command import numbers_of_facts
from lab.studies.recall.report import plot, report, table
from lab.studies.recall.told import Told
from pretrain.config.loader import config_changes, from_dict, to_dict
from pretrain.config.schema import RunConfig
from pretrain.data.tokenizer import ByteTokenizer

FACTS = make_facts(100, 3)


def test_facts_have_a_name_of_their_own_and_a_random_value() -> None:
    assert len({fact[:4] for fact in FACTS}) == 100
    assert all(fact[:4].islower() and fact[4:].isupper() and len(fact) == FACT_LETTERS for fact in FACTS)
    # Few of 100 values out of 676 are the same.
    assert len({fact[4:] for fact in FACTS}) > 80
    assert make_facts(100, 3) == FACTS != make_facts(100, 4)
    # More facts do not change what was there.
    assert pytest.approx(2 * math.log(26)) == GUESS_NATS
    assert MAX_FACTS == 26**4


def test_documents_state_all_facts_before_any_again() -> None:
    texts = list(documents(FACTS, 100 * FACT_LETTERS * 3, 64, 5))
    stated = [text[i : i + FACT_LETTERS] for text in texts for i in range(0, len(text), FACT_LETTERS)]
    assert {len(text) for text in texts} == {60}
    rounds = [stated[first : first + 100] for first in range(0, 300, 100)]
    assert all(Counter(once) == Counter(FACTS) for once in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert sum(map(len, texts)) >= 1800
    again = islice(documents(FACTS, 1, 64, 5), 1)
    assert next(again) == texts[0]


def test_documents_are_written_as_they_are_read(tmp_path: Path) -> None:
    write_documents(tmp_path / "facts.jsonl", iter(["aaaaBB", "ccccDD"]))
    rows = [json.loads(line) for line in (tmp_path / "facts.jsonl").read_text().splitlines()]
    assert rows == [{"text": "aaaaBB"}, {"text": "ccccDD"}]


def test_a_study_goes_on_in_a_folder_that_was_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration that its runs keep has absolute paths, and is that of the next start."""
    monkeypatch.chdir(tmp_path)
    config = Told.of(RunConfig(name="small"), 32, 5, Path("runs/my recall"), 1).config
    assert config_changes(from_dict(to_dict(config)), config) == {}
    assert config.data.datasets[0].path == str(tmp_path / "runs/my recall/data/facts_32/seed_5")


def test_every_fact_is_asked_once_and_the_last_sequence_is_filled_up() -> None:
    batches = _batches(FACTS, ByteTokenizer(), micro_batch_size=4, sequence_length=65)
    assert [tuple(batch.shape) for batch in batches] == [(4, 61), (4, 61), (2, 61)]
    assert all((batch[:, 0] == ByteTokenizer.eod).all() for batch in batches)
    texts = [bytes(row[1:].tolist()).decode() for batch in batches for row in batch]
    assert "".join(texts) == "".join(FACTS)
    (short,) = _batches(FACTS[:7], ByteTokenizer(), micro_batch_size=4, sequence_length=24)
    assert bytes(short[1, 1:].tolist()).decode() == "".join([*FACTS[4:7], FACTS[0]])
    assert _batches(FACTS[:2], ByteTokenizer(), micro_batch_size=4, sequence_length=240)[0].shape == (1, 13)


def test_a_fact_is_known_if_both_letters_are() -> None:
    facts = ["abcdXY", "efghZW", "ijklUV"]
    targets = torch.tensor([list("".join(facts).encode())])
    sure = 30.0
    logits = sure * torch.nn.functional.one_hot(targets, 257).float()
    # Names cannot be known, and nobody asks.
    logits[0, :4] = 0.0
    assert asked(logits, targets).tolist() == pytest.approx([3, 3, 0], abs=1e-9)
    # One letter of the second fact taken for another one, one of the third not known at all.
    logits[0, 6 + 5] = sure * torch.nn.functional.one_hot(torch.tensor(1), 257)
    logits[0, 12 + 4] = 0.0
    count, known, nats = asked(logits, targets).tolist()
    assert (count, known) == (3, 1)
    assert nats == pytest.approx(sure + math.log(257), rel=1e-6)


def test_numbers_of_facts() -> None:
    assert numbers_of_facts("4096,1024,1024") == (1024, 4096)
    for wrong in ("0", str(MAX_FACTS + 1)):
        with pytest.raises(argparse.ArgumentTypeError, match=f"from 1 to {MAX_FACTS}"):
            numbers_of_facts(wrong)


def test_the_report() -> None:
    figures = [ModelFigures("dense", 2_000_000, 1_000_000, 2e6, 0), ModelFigures("memory", 4_000_000, 1, 2.2e6, 8)]
    found = {
        "dense": {64: [Recall(0.2, 3.0), Recall(0.3, 3.5)], 128: [Recall(0.125, 5.0)]},
        "memory": {64: [Recall(1.0, 0.01)]},
    }
    *_, first, second = table(figures, found).splitlines()
    assert first == "| dense | 2.000M | 2.000 | 25.0% (20.0% to 30.0%), 3.25 | 12.5%, 5.00 |"
    assert second == "| memory | 4.000M | 2.200 (**+10.0%**) | 100.0%, 0.01 | not run |"
    text = report(
        RunConfig(), figures, found, notes=["b is a."], seeds=(1, 2), plot_name="r.svg", command="megamem recall x"
    )
    assert all(part in text for part in ("2 models", "](r.svg)", "megamem recall x", "costs 6.52", first))
    assert "weights and facts from seeds 1, 2, in means" in " ".join(text.split())
    assert "\n\n- b is a.\n\n![Facts known]" in text
    known, nats = plot(found).axes
    assert [list(line.get_ydata()) for line in known.lines] == [[0.25, 0.125], [1.0]]
    assert [list(line.get_xdata()) for line in nats.lines[:2]] == [[64, 128], [64]]
