"""Options of a preparation together, two and more at a time, against the documents that were written."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.manifest import open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.sources import PairFields
from pretrain.data.tokenizer import ByteTokenizer

MANY = [f"paragraph {number} of one text. and its second sentence\n\n" * (number % 3 + 1) for number in range(12)]
# Of which the end has to be held out.
ONE = ["a long sentence of many words. " * 9]
NAMED = ["held out by its name\n", "and so is this\n"]
EOD = ByteTokenizer().eod


def records(texts: list[str], fields: str) -> str:
    """A line of JSON per text: in `text`, in `body`, or as a prompt of four letters and an answer."""
    if fields == "pair":
        return "".join(json.dumps({"q": text[:4], "a": text[4:], "text": 3}) + "\n" for text in texts)
    return "".join(json.dumps({"text": "not this", fields: text}) + "\n" for text in texts)


def written(folder: Path, split: str) -> list[str]:
    """Texts of a split's documents, read without the code that reads them in training."""
    ids = np.fromfile(folder / f"{split}.bin", dtype=np.uint16) if (folder / f"{split}.bin").exists() else np.empty(0)
    ends = np.flatnonzero(ids == EOD)
    return [bytes(part[part != EOD].astype(np.uint8)).decode() for part in np.split(ids, ends + 1)[:-1]]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fields", ["text", "body", "pair"])
@pytest.mark.parametrize("texts", [MANY, ONE], ids=["many", "one"])
def test_options_do_not_change_what_the_others_ask_for(
    tmp_path: Path, texts: list[str], fields: str, workers: int
) -> None:
    source, named = tmp_path / "a.jsonl", tmp_path / "named.jsonl"
    named.write_text(records(NAMED, fields))
    # Workers are started for each: two of them for a few.
    for number, (held, cut, bad) in enumerate(product(("none", "some", "named"), (None, 60, 200), (0, 2))):
        if fields == "pair" and (cut is not None or (texts is ONE and held == "some")):
            # Pairs are not cut.
            continue
        if workers == 2 and number % 5:
            continue
        source.write_text("{broken\n" * bad + records(texts, fields))
        result = prepare(
            [str(source)],
            tmp_path / "out",
            ByteTokenizer(),
            field_name="text" if fields == "pair" else fields,
            pair=PairFields("q", "a") if fields == "pair" else None,
            validation_fraction=0.1 if held == "some" else 0.0,
            validation_inputs=[str(named)] if held == "named" else (),
            cut_documents=cut,
            max_bad=bad,
            num_workers=workers,
            seed=number,
            overwrite=True,
        )
        train, validation = (written(tmp_path / "out", split) for split in ("train", "validation"))
        held_out = {"none": [], "named": NAMED}.get(held)
        case = (held, cut, bad)
        if held_out is None:
            assert train, case
            assert 0 < sum(map(len, validation)) < 0.3 * sum(map(len, texts)), case
            # Both splits keep the order of the source.
            both, rest = "", {"train": list(train), "validation": list(validation)}
            while len(both) < sum(map(len, texts)):
                at = "".join(texts)[len(both) :]
                name = next(name for name, left in rest.items() if left and at.startswith(left[0]))
                both += rest[name].pop(0)
            assert not any(rest.values()), case
        else:
            assert "".join(train) == "".join(texts), case
            assert "".join(validation) == "".join(held_out), case
            if cut is None:
                assert (train, validation) == (texts, held_out), case
        assert cut is None or max(map(len, train + validation)) <= cut, case
        assert result.dataset.manifest.num_skipped == bad, case
        open_dataset(tmp_path / "out").verify()
